"""Every block of every page runs, in order, in a directory of its own."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import pytest

from support.blocks import PAGES, ROOT, complaints, document, name
from support.launched import run_forked


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_every_block_can_be_run(page: Path) -> None:
    assert complaints(page) == []


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_page(page: Path, tmp_path: Path) -> None:
    if not list(document(page)):
        pytest.skip("no code")
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    path = os.pathsep.join([str(ROOT / "tests"), str(ROOT / "src")])
    with contextlib.chdir(tmp_path):
        run_forked([{"PYTHONPATH": path}], "support.pages", (), [name(page)])
