"""Every block of every page runs, in order, in a directory of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from support.blocks import PAGES, ROOT, complaints, document, name


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_every_block_can_be_run(page: Path) -> None:
    assert complaints(page) == []


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_page(page: Path, tmp_path: Path) -> None:
    if not list(document(page)):
        pytest.skip("no code")
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    path = os.pathsep.join([str(ROOT / "tests"), str(ROOT / "src")])
    done = subprocess.run(
        [sys.executable, "-W", "error::RuntimeWarning:paceline", "-m", "support.pages", name(page)],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout + done.stderr
