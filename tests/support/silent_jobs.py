"""What ranks do whose loss is no number for a while."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from paceline.errors import PacelineError
from paceline.torch import Pace
from support.torch_jobs import Samples, fresh, optimizer_of


def no_number(rank: int, ranks: int) -> tuple[str, list[tuple[int, list[int]]], list[str]]:
    """The loss of rank 1 is NaN in round 2: the sentence where that raises, what a function hears of it, and what is
    warned of by default."""
    heard: list[tuple[int, list[int]]] = []
    sentence = ""
    try:
        _rounds(rank, on_nan="raise")
    except PacelineError as error:
        sentence = str(error)
    _rounds(rank, on_nan=lambda step, who: heard.append((step, who)))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        _rounds(rank)
    return sentence, heard, [str(w.message) for w in caught if "not finite" in str(w.message)]


def _rounds(rank: int, **options: Any) -> None:
    ddp = DistributedDataParallel(fresh(torch.float64))
    optimizer, loss_of = optimizer_of(ddp), nn.CrossEntropyLoss()
    pace = Pace(ddp, 12, "equal", **options)
    try:
        for x, y, _ in pace.loader(Samples(12 * 4), seed=5):
            loss = loss_of(ddp(x), y)
            odd = float("nan") if rank == 1 and pace.rounds == 2 else 0.0
            pace.backward(loss + odd)  # whose gradient is a number all the same
            pace.step(optimizer)
    finally:
        pace.detach()
