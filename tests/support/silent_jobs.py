"""What ranks do whose loss is no number for a while."""

from __future__ import annotations

import warnings
from contextlib import suppress
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from paceline.errors import PacelineError
from paceline.torch import Pace, meter
from paceline.torch.callbacks import Callback, OnRound, StopOnNan
from support.torch_jobs import Samples, fresh, optimizer_of


def no_number(rank: int, ranks: int) -> tuple[str, list[tuple[int, list[int]]], list[str]]:
    """The loss of rank 1 is NaN in round 2: the sentence where that raises, what a function hears of it, and what is
    warned of by default."""
    heard: list[tuple[int, list[int]]] = []
    sentence = ""
    try:
        _rounds(rank, [StopOnNan()])
    except PacelineError as error:
        sentence = str(error)
    _rounds(rank, [Heard(heard)])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        _rounds(rank, [])
    return sentence, heard, [str(w.message) for w in caught if "not finite" in str(w.message)]


class Heard(Callback):
    def __init__(self, heard: list[tuple[int, list[int]]]) -> None:
        self.heard = heard

    def on_nan(self, step: int, ranks: list[int]) -> None:
        self.heard.append((step, ranks))


def _rounds(rank: int, callbacks: list[Callback]) -> None:
    ddp = DistributedDataParallel(fresh(torch.float64))
    optimizer, loss_of = optimizer_of(ddp), nn.CrossEntropyLoss()
    pace = Pace(ddp, 12, "equal", callbacks=callbacks)
    try:
        for x, y, _ in pace.loader(Samples(12 * 4), seed=5):
            loss = loss_of(ddp(x), y)
            odd = float("nan") if rank == 1 and pace.rounds == 2 else 0.0
            pace.backward(loss + odd)  # whose gradient is a number all the same
            pace.step(optimizer)
    finally:
        pace.host.detach()


def own_options(rank: int, ranks: int, name: str, group: int, by: Any) -> str:
    """Rank 1 changes one option of its optimizer from round 2 on: the error message."""
    net = fresh(torch.float64)
    ddp = DistributedDataParallel(net)
    groups = [{"params": net.first.parameters()}, {"params": net.second.parameters(), "lr": 1e-3}]
    optimizer, loss_of = torch.optim.AdamW(groups, weight_decay=1e-6), nn.CrossEntropyLoss()
    pace = Pace(ddp, 12, "equal")
    try:
        for x, y, _ in pace.loader(Samples(12 * 8), seed=5):
            options = optimizer.param_groups[group]
            if rank == 1 and pace.rounds == 2 and name:
                options[name] = by if not isinstance(by, float) else options[name] * by
            pace.backward(loss_of(ddp(x), y))
            pace.step(optimizer)
    except PacelineError as error:
        return str(error)
    finally:
        pace.host.abandon()
        pace.host.detach()
    return ""


class Left(Exception):
    """What a loop is left by."""


Told = tuple[list[Any], list[int], int, str]


def left_alone(rank: int, ranks: int, who: list[int], how: str, policy: str, at: int) -> Told:
    """The ranks ``who`` leave the loop in round ``at`` by a break or an exception, when it is complete but not
    stepped; all go on with another loop. The parameters then, the rounds that were told of, the rounds done, and the
    words of an error."""
    meter.LATE_SECONDS = 1.0
    ddp = DistributedDataParallel(fresh(torch.float64))
    optimizer, loss_of, told, words = optimizer_of(ddp), nn.CrossEntropyLoss(), list[int](), ""
    pace = Pace(ddp, 12, policy, callbacks=[OnRound(lambda result: told.append(result.step))])
    loader = pace.loader(Samples(12 * 40), seed=5)

    try:
        with pace:
            for epoch in range(2):
                with suppress(Left):
                    for x, y, _ in loader:
                        pace.backward(loss_of(ddp(x), y))
                        if epoch == 0 and pace.rounds == at and rank in who:
                            if how == "exception":
                                raise Left
                            break
                        pace.step(optimizer)
    except PacelineError as error:
        words = str(error)
    return [p.detach().numpy().copy() for p in ddp.parameters()], told, pace.rounds, words


def other_epochs(rank: int, ranks: int) -> str:
    """What is said if rank 1 alone asks for another epoch."""
    ddp = DistributedDataParallel(fresh(torch.float64))
    optimizer, loss_of = optimizer_of(ddp), nn.CrossEntropyLoss()
    try:
        with Pace(ddp, 12, "equal") as pace:
            loader = pace.loader(Samples(12 * 40), seed=5)
            loader.set_epoch(rank % 2)
            for x, y, _ in loader:
                pace.backward(loss_of(ddp(x), y))
                pace.step(optimizer)
    except PacelineError as error:
        return str(error)
    return ""


def own_schedules(rank: int, ranks: int, alike: bool) -> str:
    """A learning rate that falls with the samples, of this rank alone or (``alike``) of all ranks: what is said."""
    ddp = DistributedDataParallel(fresh(torch.float64))
    optimizer, loss_of, seen = torch.optim.SGD(ddp.parameters(), lr=0.1), nn.CrossEntropyLoss(), 0
    pace = Pace(ddp, 12, "equal", limits=[(None, 2)] + [(None, None)] * (ranks - 1))
    try:
        for x, y, _ in pace.loader(Samples(12 * 8), seed=5):
            pace.backward(loss_of(ddp(x), y))
            pace.step(optimizer)
            seen += 12 if alike else len(x)
            # unlike processors may round otherwise
            optimizer.param_groups[0]["lr"] = 0.1 / (1 + seen) * (1 + 1e-12 * rank)
    except PacelineError as error:
        return str(error)
    finally:
        pace.host.abandon()
        pace.host.detach()
    return ""
