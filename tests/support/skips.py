"""Tests that are skipped, and the list of them at the end of a run: why, how many, where, and how to run them."""

from __future__ import annotations

import re
from collections.abc import Iterable
from importlib.util import find_spec

import pytest

ABSENT = re.compile(r"could not import '([\w.]+)'|^needs (\w+)$")
PACKAGES = {"PIL": "pillow", "sentence_transformers": "sentence-transformers", "yaml": "pyyaml"}


def advice(reason: str) -> str:
    """A reason with the command that installs what it lacks; other reasons say by themselves what to do."""
    absent = ABSENT.search(reason)
    if not absent:
        return reason
    module = (absent[1] or absent[2]).split(".")[0]
    return f"no {module}: pip install {PACKAGES.get(module, module)}"


def listed(reports: Iterable[pytest.TestReport | pytest.CollectReport]) -> list[str]:
    """One line for each reason, the most frequent first: tests, reason, files."""
    found: dict[str, list[str]] = {}
    for report in reports:
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        file = report.nodeid.split("::")[0].removeprefix("tests/")
        found.setdefault(advice(reason.removeprefix("Skipped: ")), []).append(file)
    rows = sorted(found.items(), key=lambda row: (-len(row[1]), row[0]))
    return [f"{len(files):3d}  {reason}  ({', '.join(sorted(set(files)))})" for reason, files in rows]


def with_data(name: str) -> pytest.MarkDecorator:
    """Skips a test where this folder of data sets or traces is not there."""
    from paceline.papers import data_folder

    reason = f"no {name}/ in {data_folder()}; set PACELINE_DATA to a folder that has it"
    return pytest.mark.skipif(not (data_folder() / name).is_dir(), reason=reason)


def skip_without(package: str) -> None:
    """As ``pytest.importorskip`` for the tests of the calling module, but nothing is imported: hosts take seconds."""
    if find_spec(package) is None:
        pytest.skip(f"needs {package}", allow_module_level=True)
