"""The index of the papers has every equation, line and figure, and is what the marks in the docstrings make of it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from support.blocks import ROOT
from support.scripts import loaded

GUARANTEES = (
    "A citation that leads nowhere, or a place of the five papers without a "
    "test, or without code or a reason, fails a test.",
)


equations = loaded(ROOT / "docs" / "equations.py")
PAGE = (ROOT / "docs" / "equations.md").read_text(encoding="utf-8")
PAPERS = {
    title: [
        [cell.strip() for cell in line[1:-1].split("|")] for line in text.splitlines() if line[:2] == "| "
    ][1:]
    for title, text in re.findall(r"^## (.+?)\n(.+?)(?=^## |\Z)", PAGE, re.MULTILINE | re.DOTALL)
}
EQUATIONS = {"DOLBIE": 11, "LB-BSP": 8, "WLBS and LSP": 7, "DBW": 19, "Coded computation": 11}
LINES = {
    ("DOLBIE", "Alg. 1"): 16,
    ("DOLBIE", "Alg. 2"): 13,
    ("LB-BSP", "Alg. 1, worker"): 6,
    ("LB-BSP", "Alg. 1, server"): 3,
    ("LB-BSP", "Alg. 1, manager"): 6,
    ("WLBS and LSP", "node's"): 7,
    ("WLBS and LSP", "server's"): 7,
    ("Coded computation", "Alg. 1"): 29,
    ("Coded computation", "Alg. 2"): 12,
    ("Coded computation", "Alg. 3"): 6,
}
FIGURES = {
    "DOLBIE": {*range(3, 12)},
    "LB-BSP": {3, 6, *range(8, 15)},
    "DBW": {*range(1, 11)},
    "Coded computation": {2, 3, 4},
}  # the others are drawings


def places(paper: str) -> set[str]:
    return {place for row in PAPERS[paper] for place in equations.places(row[0])}


@pytest.mark.parametrize("paper", EQUATIONS)
def test_every_equation_has_a_row(paper: str) -> None:
    wanted = {f"eq. ({n})" for n in range(1, EQUATIONS[paper] + 1)}
    assert {place for place in places(paper) if place.startswith("eq.")} == wanted


@pytest.mark.parametrize(("paper", "algorithm"), LINES)
def test_every_line_of_an_algorithm_has_a_row(paper: str, algorithm: str) -> None:
    wanted = {f"{algorithm}, line {n}" for n in range(1, LINES[paper, algorithm] + 1)}
    assert {place for place in places(paper) if place.startswith(f"{algorithm}, line")} == wanted


@pytest.mark.parametrize("paper", FIGURES)
def test_every_figure_has_a_row(paper: str) -> None:
    wanted = {f"Fig. {n}" for n in FIGURES[paper]}
    assert {place for place in places(paper) if place.startswith("Fig.")} == wanted


def test_the_page_is_what_the_marks_make_of_it() -> None:
    made, wrong = equations.made()
    assert wrong == []
    assert made == PAGE, "docs/equations.md is stale: python docs/equations.py"
    assert sum(len(rows) for rows in PAPERS.values()) > 110


def test_marks_are_found_in_modules_classes_and_functions(tmp_path: Path) -> None:
    (tmp_path / "room").mkdir()
    (tmp_path / "room" / "__init__.py").write_text('"""Whatever (DBW, Fig. 3)."""\n')
    (tmp_path / "room" / "rule.py").write_text(
        'class Rule:\n    """A rule."""\n\n    def step(self):\n        """One step (DOLBIE, eqs. (4) to (6),\n'
        '        Alg. 2, lines 5 and 6; LB-BSP, Alg. 1, worker). DOLBIE\'s Fig. 3 is no mark."""\n'
    )
    found = [tuple(mark) for mark in equations.marks(tmp_path, ".")]
    assert found == [
        ("room", "DBW", "Fig. 3"),
        *(("room.rule.Rule.step", "DOLBIE", f"eq. ({n})") for n in (4, 5, 6)),
        *(("room.rule.Rule.step", "DOLBIE", f"Alg. 2, line {n}") for n in (5, 6)),
        ("room.rule.Rule.step", "LB-BSP", "Alg. 1, worker"),
    ]


@pytest.mark.parametrize(
    ("row", "marked", "wrong"),
    [
        ("| eq. (1) | says | — | — | why not |", ["eq. (1)"], []),
        (
            "| eq. (1) | says | `old` | — | why |",
            ["eq. (1)"],
            ["no code is marked; if there is none, write —, and why"],
        ),
        (
            "| eq. (1) | says | — | — | |",
            ["eq. (1)"],
            ["no code is marked; if there is none, write —, and why"],
        ),
        ("| eq. (1) | says | — | — | why |", [], ["no test is marked"]),
        ("| eq. (1) | says | — | — | why |", ["eq. (1)", "eq. (2)"], ["eq. (2) is no row of the page"]),
        ("| the text | says | — | — | why |", [], ["not the name of a place", "no test is marked"]),
    ],
)
def test_errors_of_a_row_are_reported(row: str, marked: list[str], wrong: list[str]) -> None:
    tests = [equations.Mark("test_it", "DBW", place) for place in marked]
    _, found = equations.filled(f"## DBW\n\n{row}\n", [], tests)
    assert len(found) == len(wrong)
    assert all(text in sentence for text, sentence in zip(wrong, found, strict=True)), found


def test_cells_are_filled_from_the_marks() -> None:
    code = [equations.Mark("b", "DBW", "Alg. 1"), equations.Mark("a", "DBW", "Alg. 1, line 2")]
    tests = [
        equations.Mark(name, "DBW", "Alg. 1, line 1")
        for name in ("a.py::test", "papers/test_equations.py::x")
    ]
    page, wrong = equations.filled("## DBW\n| Alg. 1, lines 1 to 2 | says | `gone` | — | |\n", code, tests)
    assert wrong == []
    assert page.splitlines()[1] == (
        "| Alg. 1, lines 1 to 2 | says | `a`, `b` | `papers/test_equations.py::x`, `a.py::test` | |"
    )
