"""The page of guarantees is what its script makes of the tests' promises."""

from __future__ import annotations

from pathlib import Path

from support.blocks import ROOT
from support.scripts import loaded

guarantees = loaded(ROOT / "docs" / "guarantees.py")


def test_page_has_the_promises_of_the_tests() -> None:
    page, wrong = guarantees.made()
    assert wrong == []
    kept = (ROOT / "docs" / "guarantees.md").read_text(encoding="utf-8")
    assert kept == page, "python docs/guarantees.py makes docs/guarantees.md again"


def test_promises_are_read_from_functions_methods_and_files(tmp_path: Path) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "test_a.py").write_text(
        'GUARANTEES = ("All of it " "works.",)\n\n\n'
        '@guarantee("Once.")\n@guarantee("Twice.")\ndef test_b():\n    pass\n\n\n'
        'class TestC:\n    @guarantee("Within.")\n    def test_d(self):\n        pass\n'
    )
    assert [*guarantees.guarantees(tmp_path)] == [
        ("All of it works.", "torch/test_a.py"),
        ("Once.", "torch/test_a.py::test_b"),
        ("Twice.", "torch/test_a.py::test_b"),
        ("Within.", "torch/test_a.py::TestC::test_d"),
    ]


def test_promises_of_several_tests_are_read_from_constants(tmp_path: Path) -> None:
    (tmp_path / "test_a.py").write_text('KEEPS = guarantee("Keeps.")\n\n\n@KEEPS\ndef test_b():\n    pass\n')
    assert [*guarantees.guarantees(tmp_path)] == [("Keeps.", "test_a.py::test_b")]


def test_longest_beginning_of_a_path_gives_the_group() -> None:
    assert guarantees.heading("torch/test_loops.py") == "Your own training loop"
    assert guarantees.heading("torch/elastic/test_member.py::test_a").startswith("Ranks that freeze")
    assert guarantees.heading("elsewhere/test_a.py") == ""


def test_long_and_homeless_promises_are_errors() -> None:
    found = [("A" * 161, "torch/a.py"), ("B.", "torch/a.py"), ("C.", "nowhere/c.py")]
    _, wrong = guarantees.page([guarantees.Guarantee(*each) for each in found])
    assert [each.split(":")[0] for each in wrong] == ["torch/a.py", "nowhere/c.py"]


def test_promises_that_begin_with_the_same_file_share_a_row() -> None:
    found = [("A.", "torch/a.py::test_a"), ("A.", "serve/b.py::test_b"), ("A.", "torch/a.py::test_c")]
    found += [("B.", "torch/a.py::test_b"), ("C.", "torch/c.py")]
    page, wrong = guarantees.page([guarantees.Guarantee(*each) for each in found])
    assert wrong == []
    assert "\n| A. (also `serve/b.py`)<br>B. | `torch/a.py` |\n| C. | `torch/c.py` |\n" in page
