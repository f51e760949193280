"""Fills the Code and Test columns of docs/equations.md from marks in docstrings: ``python docs/equations.py``.

A mark is a paper's name and one or more of its places, in the docstring of what computes them or of the test that
checks them: ``DOLBIE, eqs. (5), (6)`` or ``LB-BSP, Alg. 1, worker, lines 1 to 6``. The page's first two columns and
its last one are written by hand: which places there are, what they say, and what is missing or different. The script
fails if a mark points to no row, and if a row has no test, or neither code nor the reason.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
PAPERS = {  # as marks name them, and as the page's headings do
    "DOLBIE": "DOLBIE",
    "LB-BSP": "LB-BSP",
    "WLBS": "WLBS and LSP",
    "DBW": "DBW",
    "Sun et al.": "Coded computation",
}
PLACE = "|".join([
    r"eqs?\. \(\d+\)(?:(?:, | and | to )\(\d+\))*",
    r"Figs?\. \d+(?:(?:, | and | to )\d+)*",
    r"(?:Alg\.|Algorithm) \d(?:, [a-z]{6,})?(?:, lines? \d+(?: (?:to|and) \d+)?)?",
    r"(?:node|server)'s steps?(?: \d+(?: (?:to|and) \d+)?)?",
    r"(?:Theorem|Lemma|Proposition|Table|[Ss]ection|Appendix) [\w.-]*\w(?: \([\w ,]+\))?",
    r"benchmark \d|baseline [\w-]+|setting|experiments",
])  # fmt: skip
LIST = rf"(?:{PLACE})(?:(?:, | and )(?:{PLACE}))*"
MARK = re.compile(rf"({'|'.join(map(re.escape, PAPERS))}), ({LIST})")
DASH = "—"


class Mark(NamedTuple):
    """A docstring's word that something is a place of a paper. owner: what has the docstring."""

    owner: str
    paper: str
    place: str


def places(text: str) -> Iterator[str]:
    """The places of a list, each by itself; an algorithm without lines is all that begins with its name."""
    for each in re.findall(PLACE, text):
        each = each.replace("Algorithm", "Alg.").replace("Section", "section")
        first = re.match(r"(.*?)(eq|Fig)s?\. ", each)
        lines = re.match(
            r"(.+?)(?:, line| step)s? (\d+)(?: (to|and) (\d+))?$", each.replace("steps", "step", 1)
        )
        if first:
            form = f"{first[2]}. (%d)" if first[2] == "eq" else f"{first[2]}. %d"
            yield from (form % n for n in _numbers(each[first.end() :]))
        elif lines:
            text = lines[2] + (f" {lines[3]} {lines[4]}" if lines[3] else "")
            yield from (f"{lines[1]}, line {n}" for n in _numbers(text))
        else:
            yield each.replace("'s steps", "'s")


def _numbers(text: str) -> list[int]:
    """``(3), (5) to (7)`` or ``3, 5 and 6`` as whole numbers."""
    found: list[int] = []
    for word, number in re.findall(r"(to )?\(?(\d+)", text):
        found += range(found[-1] + 1, int(number) + 1) if word else [int(number)]
    return found


def marks(folder: Path, name: str) -> Iterator[Mark]:
    """The marks of all docstrings below a folder; name: how a file's parts become an owner, "." or "::"."""
    for path in sorted(folder.rglob("*.py")):
        parts = path.relative_to(folder).with_suffix("" if name == "." else ".py").parts
        file = ("." if name == "." else "/").join(part for part in parts if part != "__init__")
        yield from _within(ast.parse(path.read_text(encoding="utf-8")), file, name)


def _within(node: ast.Module | ast.ClassDef | ast.FunctionDef, owner: str, name: str) -> Iterator[Mark]:
    text = " ".join((ast.get_docstring(node) or "").split())
    for paper, listed in MARK.findall(text):
        yield from (Mark(owner, PAPERS[paper], place) for place in places(listed))
    for child in node.body:
        if isinstance(child, ast.ClassDef | ast.FunctionDef):
            yield from _within(child, f"{owner}{name}{child.name}", name)


def filled(page: str, code: list[Mark], tests: list[Mark]) -> tuple[str, list[str]]:
    """The page with its two columns made again, and what is wrong with it: a sentence for each."""
    wrong, paper, lines = [], "", []
    known: set[tuple[str, str]] = set()
    for line in page.splitlines():
        if line.startswith("## "):
            paper = line[3:]
        cells = [cell.strip() for cell in line[1:-1].split("|")]
        if line.startswith("| ") and len(cells) == 5 and cells[0] != "Place":
            row, says, _, _, remark = cells
            if not re.fullmatch(LIST, row):
                wrong.append(f"{paper}, {row}: not the name of a place")
            here = {(paper, place) for place in places(row)}
            wrong += [f"{paper}, {place}: has two rows" for _, place in sorted(here & known)]
            known |= here
            owners = [
                sorted({m.owner for m in found if _meets(m, here)}, key=_order) for found in (code, tests)
            ]
            if not owners[0] and (cells[2] != DASH or not remark):
                wrong.append(f"{paper}, {row}: no code is marked; if there is none, write {DASH}, and why")
            if not owners[1]:
                wrong.append(f"{paper}, {row}: no test is marked")
            shown = [", ".join(f"`{owner}`" for owner in found) or DASH for found in owners]
            line = f"| {row} | {says} | {shown[0]} | {shown[1]} | {remark} |".replace("|  |", "| |")
        lines.append(line)
    for mark in (*code, *tests):
        if not any(_meets(mark, {each}) for each in known):
            wrong.append(f"{mark.owner}: {mark.paper}, {mark.place} is no row of the page")
    return "\n".join(lines) + "\n", wrong


def _meets(mark: Mark, here: set[tuple[str, str]]) -> bool:
    whole = (mark.paper, mark.place) in here
    return whole or any(
        paper == mark.paper and place.startswith(f"{mark.place}, ") and "line" in place
        for paper, place in here
    )


def _order(owner: str) -> tuple[bool, str]:
    """Derivations from the papers' texts alone come first."""
    return not owner.startswith("papers/test_equations"), owner


def made() -> tuple[str, list[str]]:
    """The page as it should be, and what is wrong: see ``filled``."""
    page = (ROOT / "docs" / "equations.md").read_text(encoding="utf-8")
    return filled(page, [*marks(ROOT / "src" / "paceline", ".")], [*marks(ROOT / "tests", "::")])


if __name__ == "__main__":
    text, errors = made()
    (ROOT / "docs" / "equations.md").write_text(text, encoding="utf-8")
    sys.exit("\n".join(errors) or 0)
