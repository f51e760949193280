"""The diff by which the README ports a script: both sides train the same model, and the home page shows the same."""

from __future__ import annotations

import re

import numpy as np
import pytest

pytest.importorskip("torch")


from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from support.blocks import ROOT
from support.ranks import run_ranks


def block(page: str) -> list[str]:
    found = re.search(r"```diff\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)
    assert found is not None
    return found[1].splitlines()


EPOCHS, SAMPLES = 5, 256  # as many as a batch of the README's


def trained(rank: int, ranks: int, script: str) -> tuple[list[float], int]:
    """The parameters after some epochs of one batch each, in double precision; and how many steps were taken."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    dataset = TensorDataset(torch.randn(SAMPLES, 4).double(), torch.randn(SAMPLES, 1).double())
    model = nn.Linear(4, 1).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    steps: list[int] = []
    optimizer.register_step_post_hook(lambda *_: steps.append(1))
    names: dict[str, Any] = {
        "DistributedDataParallel": DistributedDataParallel,
        "DistributedSampler": DistributedSampler,
        "DataLoader": DataLoader,
        "model": model,
        "dataset": dataset,
        "criterion": nn.MSELoss(),
        "optimizer": optimizer,
        "epochs": EPOCHS,
    }
    exec(script, names)
    if "pace" in names:
        names["pace"].host.detach()
    return torch.cat([p.detach().ravel() for p in model.parameters()]).tolist(), len(steps)


def test_both_sides_of_the_readme_diff_train_the_same_model() -> None:
    lines = block("README.md")
    before = "\n".join(line[1:] for line in lines if not line.startswith("+"))
    after = "\n".join(line[1:] for line in lines if not line.startswith("-"))
    ranks, batch = 4, int(re.findall(r"global_batch=(\d+)", after)[0])
    steps = EPOCHS * SAMPLES // batch
    ours = run_ranks(ranks, trained, after)
    plain = run_ranks(ranks, trained, before)
    assert [count for _, count in (*ours, *plain)] == [steps] * 2 * ranks
    # Each step has the whole data set, in whatever order: the same model.
    for parameters, _ in (*ours, *plain[1:]):
        np.testing.assert_allclose(parameters, plain[0][0], rtol=1e-12)


def test_home_page_has_the_diff_of_the_readme() -> None:
    assert block("docs/index.md") == block("README.md")
