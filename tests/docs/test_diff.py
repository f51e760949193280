"""The diff by which the README ports a script: both sides train the same model, and the home page shows the same."""

from __future__ import annotations

import re

import numpy as np
import pytest

pytest.importorskip("torch")

from support import diff_jobs
from support.blocks import ROOT
from support.ranks import run_ranks


def block(page: str) -> list[str]:
    found = re.search(r"```diff\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)
    assert found is not None
    return found[1].splitlines()


def test_both_sides_of_the_diff_train() -> None:
    lines = block("README.md")
    before = "\n".join(line[1:] for line in lines if not line.startswith("+"))
    after = "\n".join(line[1:] for line in lines if not line.startswith("-"))
    ranks, batch = 4, int(re.findall(r"global_batch=(\d+)", after)[0])
    steps = diff_jobs.EPOCHS * diff_jobs.SAMPLES // batch
    ours = run_ranks(ranks, diff_jobs.trained, after)
    plain = run_ranks(ranks, diff_jobs.trained, before)
    assert [count for _, count in (*ours, *plain)] == [steps] * 2 * ranks
    # Each step has the whole data set, in whatever order: the same model.
    for parameters, _ in (*ours, *plain[1:]):
        np.testing.assert_allclose(parameters, plain[0][0], rtol=1e-12)


def test_the_home_page_has_the_same_diff() -> None:
    assert block("docs/index.md") == block("README.md")
