"""The index of the papers has every equation, line and figure, and what it names is there."""

from __future__ import annotations

import importlib
import re

import pytest

from support.blocks import ROOT

PAGE = (ROOT / "docs" / "equations.md").read_text(encoding="utf-8")
PAPERS = {
    title: [
        [cell.strip() for cell in line[1:-1].split("|")] for line in text.splitlines() if line[:2] == "| "
    ][1:]
    for title, text in re.findall(r"^## (.+?)\n(.+?)(?=^## |\Z)", PAGE, re.MULTILINE | re.DOTALL)
}
ROWS = [(title, row) for title, rows in PAPERS.items() for row in rows]
EQUATIONS = {"DOLBIE": 11, "LB-BSP": 8, "WLBS and LSP": 7, "DBW": 19, "Coded computation": 11}
LINES = {
    ("DOLBIE", "Alg. 1"): 16,
    ("DOLBIE", "Alg. 2"): 13,
    ("LB-BSP", "Alg. 1, worker"): 6,
    ("LB-BSP", "Alg. 1, server"): 3,
    ("LB-BSP", "Alg. 1, manager"): 6,
    ("WLBS and LSP", "node's steps"): 7,
    ("WLBS and LSP", "server's steps"): 7,
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


def numbers(paper: str, start: str, pattern: str) -> set[int]:
    places = [row[0] for row in PAPERS[paper] if row[0].startswith(start)]
    return {int(found) for place in places for found in re.findall(pattern, place)}


@pytest.mark.parametrize("paper", EQUATIONS)
def test_every_equation_has_a_row(paper: str) -> None:
    found = {int(n) for row in PAPERS[paper] if "eq" in row[0] for n in re.findall(r"\((\d+)\)", row[0])}
    assert found == set(range(1, EQUATIONS[paper] + 1))


@pytest.mark.parametrize(("paper", "algorithm"), LINES)
def test_every_line_of_an_algorithm_has_a_row(paper: str, algorithm: str) -> None:
    found: set[int] = set()
    for row in PAPERS[paper]:
        if row[0].startswith(algorithm):
            first, last = re.search(r"(\d+) to (\d+)$", row[0]).groups()  # type: ignore[union-attr]
            found |= set(range(int(first), int(last) + 1))
    assert found == set(range(1, LINES[paper, algorithm] + 1))


@pytest.mark.parametrize("paper", FIGURES)
def test_every_figure_has_a_row(paper: str) -> None:
    assert numbers(paper, "Fig", r"\d+") == FIGURES[paper]


def test_what_a_row_names_is_there_and_a_gap_has_its_reason() -> None:
    assert len(ROWS) > 100
    for _, (place, says, code, test, remark) in ROWS:
        assert says, place
        for name in re.findall(r"`([\w.]+)`", code):
            head, *rest = ("paceline." + name).split(".")
            found = importlib.import_module(head)
            module = head
            for part in rest:
                if not hasattr(found, part):
                    importlib.import_module(f"{module}.{part}")
                found, module = getattr(found, part), f"{module}.{part}"
        for file, name in re.findall(r"`([\w/]+\.py)::(\w+)`", test):
            assert f"def {name}(" in (ROOT / "tests" / file).read_text(encoding="utf-8"), (place, file, name)
        if "—" in (code, test):
            assert remark, f"{place}: neither code nor reason"
        assert code == "—" or "`" in code, place
        assert test == "—" or "`" in test, place
