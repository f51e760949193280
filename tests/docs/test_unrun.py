"""The status table of the README says what has not run yet; pages that name CUDA and NCCL link to it."""

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


def test_the_status_table_alone_says_that_gpus_have_not_run_yet() -> None:
    unrun = re.compile(r"\b(not yet (run|been|tried)|not (run|tried) yet|not yet on)\b")
    texts = {page: (ROOT / page).read_text() for page in PAGES}
    found = [(page, line) for page, text in texts.items() for line in text.splitlines() if unrun.search(line)]
    table = texts["README.md"].split("[start:status]")[1].split("[end:status]")[0]
    assert [(page, line in table) for page, line in found] == [("README.md", True)], found
    assert "GPUs, NCCL" in found[0][1]


def test_pages_that_name_cuda_or_nccl_refuse_them_or_link_to_the_status_table() -> None:
    named, silent = 0, []
    for page in PAGES:
        text = (ROOT / page).read_text()
        parts = [part for part in APART.split(text) if NAMED.search(part)]
        named += len(parts)
        if "#status" not in text:
            silent += [f"{page}: {part[:200]}" for part in parts if not SAID.search(part)]
    assert named > 10
    assert silent == []


def test_docstrings_that_name_cuda_or_nccl_say_that_they_have_not_run_yet() -> None:
    named = [each for each in docstrings() if NAMED.search(each[1])]
    assert named
    assert [f"{where}: {said[:200]}" for where, said in named if not SAID.search(said)] == []
