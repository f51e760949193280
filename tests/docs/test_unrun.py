"""Whatever is said of CUDA and NCCL says in the same breath that it has not run there yet."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from support.blocks import ROOT

NAMED = re.compile(r"\b(CUDA|NCCL|on a GPU)\b")
SAID = re.compile(r"\b(yet|refused|refuses)\b|no GPU")
PAGES = ("README.md", *(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md")))
APART = re.compile(r"\n\s*\n|\n(?=- |\| )")  # paragraphs, entries of a list, rows of a table


def docstrings() -> Iterator[tuple[str, str]]:
    for path in sorted((ROOT / "src").rglob("*.py")):
        whole = ast.parse(path.read_text())
        if SAID.search(ast.get_docstring(whole) or ""):
            continue  # of all that is in the file
        for node in ast.walk(whole):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                yield f"{path.name}: {getattr(node, 'name', 'module')}", ast.get_docstring(node) or ""


def test_what_has_not_run_yet_is_said_so_wherever_it_is_named() -> None:
    paragraphs = [(page, part) for page in PAGES for part in APART.split((ROOT / page).read_text())]
    named = [each for each in (*paragraphs, *docstrings()) if NAMED.search(each[1])]
    assert len(named) > 10
    assert [f"{where}: {said[:200]}" for where, said in named if not SAID.search(said)] == []
