"""Every block of every page runs, in order, in a directory of its own."""

from __future__ import annotations

import contextlib
import os
import re
from itertools import groupby
from pathlib import Path

import pytest

from support import forks
from support.blocks import PAGES, ROOT, complaints, document, name


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_every_block_can_be_run(page: Path) -> None:
    assert complaints(page) == []


def cells(row: str) -> int:
    """How many a row of a table has."""
    return len(re.findall(r"(?<!\\)\|", re.sub(r"`[^`]*`", "", row.strip()))) - 1


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_the_rows_of_a_table_have_the_cells_of_its_head(page: Path) -> None:
    """One that has not was perhaps written into another table."""
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    for is_table, rows in groupby(text.splitlines(), lambda line: line.startswith("|")):
        if is_table:
            head, *rest = rows
            assert not [row for row in rest if cells(row) != cells(head)]


@pytest.mark.parametrize("page", [page for page in PAGES if [*document(page)]], ids=name)
def test_page(page: Path, tmp_path: Path) -> None:
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    path = os.pathsep.join([str(ROOT / "tests"), str(ROOT / "src")])
    with contextlib.chdir(tmp_path):
        forks.all_well([{"PYTHONPATH": path}], ["-m", "support.pages", name(page)])
