"""Garbage is collected in the same rounds on all ranks, and by count again afterwards."""

from __future__ import annotations

import gc
import time

import pytest
import torch

from paceline import PacelineError
from paceline.torch import Pace
from paceline.torch.callbacks import GarbageCollection, OnRound
from support.ranks import run_ranks

GUARANTEES = ("With the callback `GarbageCollection`, all ranks collect after the same rounds.",)


def rounds(rank: int, ranks: int, every: int, seconds: float, many: int) -> list[int]:
    """The rounds after which this rank collected, in so many rounds of so many seconds."""
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 1))
    finished: list[int] = []
    collected: list[int] = []

    def watch(phase: str, info: dict[str, int]) -> None:
        if phase == "stop" and info["generation"] == 2:
            collected.append(len(finished) + 1)

    pace = Pace(
        model, 8, callbacks=[OnRound(lambda result: finished.append(result.step)), GarbageCollection(every)]
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    assert not gc.isenabled()
    gc.callbacks.append(watch)
    try:
        for inputs, targets in pace.loader(
            torch.utils.data.TensorDataset(torch.ones(8 * many, 2), torch.ones(8 * many, 1))
        ):
            time.sleep(seconds)
            pace.backward(((model(inputs) - targets) ** 2).mean())
            pace.step(optimizer)
    finally:
        gc.callbacks.remove(watch)
    pace.host.detach()
    assert gc.isenabled()
    return collected


def test_all_ranks_collect_after_the_same_rounds() -> None:
    first, second = run_ranks(2, rounds, 3, 0.06, 7)
    assert first == second
    assert len(first) == 2
    assert first[1] - first[0] == 3


def test_short_rounds_that_are_told_of_together_are_followed_by_one_collection() -> None:
    first, second = run_ranks(2, rounds, 3, 0.0, 300)
    assert first == second
    assert 2 <= len(first) < 90


def test_interval_of_zero_rounds_raises() -> None:
    with pytest.raises(PacelineError, match=r"GarbageCollection\(every\)=0: expected a whole number"):
        GarbageCollection(0)
