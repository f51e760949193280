"""Random numbers that the processes of a loader draw, as augmentations do: none is drawn twice."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from paceline.torch import Pace
from support.ranks import run_ranks

pytestmark = pytest.mark.processes

GUARANTEES = (
    "Each epoch has its own order, and loader processes draw no random number twice; both repeat with the "
    "same `seed`.",
)

COUNT, EPOCHS = 96, 2


class Drawing(torch.utils.data.Dataset[torch.Tensor]):
    """Samples that are random numbers of torch, numpy and Python."""

    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor(
            [int(torch.randint(1 << 40, ())), int(np.random.randint(1 << 40)), random.getrandbits(40)]  # noqa: NPY002
        )


class Stream(torch.utils.data.IterableDataset[torch.Tensor]):
    def __iter__(self):  # type: ignore[no-untyped-def]
        return (Drawing()[index] for index in range(COUNT // 3))


def draws(rank: int, ranks: int, kind: str, seed: int) -> list[list[int]]:
    """What this rank's loader drew in two epochs, after the program has seeded all ranks alike."""
    torch.manual_seed(0)
    np.random.seed(0)  # noqa: NPY002
    random.seed(0)
    model = DistributedDataParallel(nn.Linear(3, 1).double())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    found: list[list[int]] = []
    policy, loop = ("factoring:portion=0.5", "pieces") if kind == "claims" else ("level", "whole")
    limits = [(1, None)] * 3 if kind == "claims" else [(12, 12), (8, 8), (4, 4)]
    with Pace(model, 24, policy, loop=loop, limits=limits) as pace:
        if kind == "stream":
            loader = pace.stream(Stream(), num_workers=1)
        else:
            loader = pace.loader(Drawing(), seed=seed, num_workers=2)  # type: ignore[assignment]
        for _ in range(EPOCHS):
            for x in loader:
                found += x.tolist() if pace.counts else []
                pace.backward(model(x.double()).mean())
                pace.step(optimizer)
    return found


@pytest.mark.parametrize("kind", ["loader", "claims", "stream"])
def test_no_rank_or_process_repeats_a_draw(kind: str) -> None:
    rows = [row for found in run_ranks(3, draws, kind, 0) for row in found]
    assert len(rows) == COUNT * EPOCHS
    for column in zip(*rows, strict=True):
        assert len(set(column)) == len(rows)


def test_draws_follow_from_the_seed() -> None:
    first, again, other = (run_ranks(2, _two, seed) for seed in (1, 1, 2))
    assert first == again
    assert first != other


def _two(rank: int, ranks: int, seed: int) -> list[list[int]]:
    torch.manual_seed(seed + 100 * rank)  # has no influence
    model = DistributedDataParallel(nn.Linear(3, 1).double())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    found: list[list[int]] = []
    with Pace(model, 24, "equal") as pace:
        for x in pace.loader(Drawing(), seed=seed, num_workers=2):
            found += x.tolist()
            pace.backward(model(x.double()).mean())
            pace.step(optimizer)
    return found
