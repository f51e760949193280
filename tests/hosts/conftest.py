"""What the tests of a host share: its jobs, run on three ranks once for the whole module."""

from __future__ import annotations

from typing import Any

import pytest

from support.ranks import run_ranks


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tmp_path_factory.mktemp("jobs"))


@pytest.fixture(scope="module")
def found(request: pytest.FixtureRequest, folder: str) -> list[dict[str, Any]]:
    """Of each rank, what the ``jobs`` of the module gave."""
    return run_ranks(3, request.module.jobs.cases, folder)
