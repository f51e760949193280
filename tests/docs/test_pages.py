"""Every block of every page runs, in order, in a directory of its own."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import pytest

from support.blocks import PAGES, ROOT, complaints, document, name
from support.launched import run_forked
from support.pages import STANDING_RAY


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_every_block_can_be_run(page: Path) -> None:
    assert complaints(page) == []


ON_RAY = ("docs/coded.md", "docs/server.md")
"""Pages whose blocks join the Ray that other tests have started, as it would be on a cluster."""


def with_its_group(page: Path) -> object:
    return pytest.param(page, marks=pytest.mark.xdist_group("ray-products") if name(page) in ON_RAY else ())


@pytest.mark.parametrize("page", [*map(with_its_group, PAGES)], ids=map(name, PAGES))
def test_page(page: Path, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    if not list(document(page)):
        pytest.skip("no code")
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    environment = {"PYTHONPATH": os.pathsep.join([str(ROOT / "tests"), str(ROOT / "src")])}
    if name(page) in ON_RAY:
        ray = request.getfixturevalue("cluster")
        environment[STANDING_RAY] = ray.get_runtime_context().gcs_address
    with contextlib.chdir(tmp_path):
        run_forked([environment], "support.pages", (), [name(page)])
