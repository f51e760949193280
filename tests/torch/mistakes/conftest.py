"""What the tests of this folder have in common."""

from __future__ import annotations

import gc

import pytest


@pytest.fixture(autouse=True)
def nothing_older() -> None:
    """Each test of a loss looks for hooks on all tensors of the process: what is older than the test is left out."""
    gc.freeze()
