"""The table of options in docs/training.md is what docs/options.py makes of Pace."""

from __future__ import annotations

import inspect

import pytest

from support.blocks import ROOT
from support.scripts import loaded

options = loaded(ROOT / "docs" / "options.py")


def test_the_table_is_the_one_that_the_script_makes() -> None:
    page = options.PAGE.read_text(encoding="utf-8")
    assert page == options.made(page, options.SOURCE.read_text(encoding="utf-8")), (
        "run python docs/options.py"
    )


def test_the_script_finds_each_parameter_of_pace_and_its_default() -> None:
    from paceline.torch import Pace

    parameters = list(inspect.signature(Pace).parameters.values())
    found = dict(options.options(options.SOURCE.read_text(encoding="utf-8")))
    assert list(found) == [each.name for each in parameters]
    for each in parameters:
        shown = found[each.name]
        assert shown == ("" if each.default is inspect.Parameter.empty else repr(each.default)), each.name


def test_an_option_without_an_entry_or_with_a_long_one_raises() -> None:
    source = 'class Pace:\n    """A class.\n\n    a: What it is.\n    """\n\n    def __init__(self, a, *, b=1): ...\n'
    with pytest.raises(ValueError, match="no entry 'b'"):
        options.table(source)
    with pytest.raises(ValueError, match="at most 120"):
        options.table(source.replace("What it is", "x" * 121))
    row = "| `a` |  | What it is. |\n| `b` | `1` | Too. |\n"
    assert options.table(source.replace("What it is.\n", "What it is.\n    b: Too. More.\n")).endswith(row)
