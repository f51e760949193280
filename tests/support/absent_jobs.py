"""What ranks do while one of them is stopped, late, or fails."""

from __future__ import annotations

import os
import signal
import subprocess
import time

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from paceline.errors import PacelineError
from paceline.torch import Pace, measure, patience
from paceline.torch.patience import Missing
from support.torch_jobs import LateWatch, Samples, fresh, optimizer_of


def stop(seconds: float) -> None:
    """Stop this process as SIGSTOP does; it goes on after so many seconds."""
    me = os.getpid()
    with subprocess.Popen(["sh", "-c", f"sleep {seconds}; kill -CONT {me}"]):
        os.kill(me, signal.SIGSTOP)


def stopped(rank: int, ranks: int, cases: list[tuple[int, int, str]]) -> list[list[Missing]]:
    """For each case (who, when, policy): whom this rank misses while rank ``who`` is stopped in round ``when``."""
    return [_stopped(rank, *case) for case in cases]


def _stopped(rank: int, who: int, when: int, policy: str) -> list[Missing]:
    ddp = DistributedDataParallel(fresh(torch.float64))
    optimizer, loss_of = optimizer_of(ddp), nn.CrossEntropyLoss()
    seen: list[Missing] = []
    pace = Pace(ddp, 60, policy, loop="pieces", on_missed=seen.append, patience=0.8)
    for x, y, _ in pace.loader(Samples(60 * 4), seed=5):
        if rank == who and pace.rounds == when and pace.first:
            stop(2.0)
        pace.backward(loss_of(ddp(x), y))
        pace.step(optimizer)
    pace.detach()
    return seen


def late(rank: int, ranks: int) -> list[Missing]:
    """Whom this rank misses while rank 1 sleeps before its first backward pass."""
    patience.LIVING = 1.5
    ddp = DistributedDataParallel(fresh(torch.float64))
    optimizer, loss_of = optimizer_of(ddp), nn.CrossEntropyLoss()
    seen: list[Missing] = []
    with Pace(ddp, 60, "equal", on_missed=seen.append, patience=1.0) as pace:
        for x, y, _ in pace.loader(Samples(60 * 2), seed=5):
            if rank == 1 and pace.rounds == 0:
                time.sleep(3.0)
            pace.backward(loss_of(ddp(x), y))
            pace.step(optimizer)
    return seen


def ahead_of_a_late_rank(rank: int, ranks: int, seconds: float) -> int:
    """Rounds done where rank 1 begins so many seconds late, and the others' reports wait for its own as on a device:
    there the host goes on without waiting for the reduction."""
    measure.stopwatch = lambda device: LateWatch()
    model = fresh(torch.float64)
    ddp = DistributedDataParallel(model)
    optimizer, loss_of = optimizer_of(ddp), nn.CrossEntropyLoss()
    with Pace(ddp, 60, "level") as pace:
        for x, y, _ in pace.loader(Samples(60 * 4), seed=5):
            if rank == 1 and pace.rounds == 1:
                time.sleep(seconds)
            with ddp.no_sync():  # nothing else holds this rank up
                pace.backward(loss_of(ddp(x), y))
            pace.step(optimizer)
        return pace.rounds


def failing(rank: int, ranks: int, who: int, policy: str) -> str:
    """The sentence, or the kind of error, with which this rank ends when rank ``who`` fails in round 2."""
    ddp = DistributedDataParallel(fresh(torch.float64))
    optimizer, loss_of = optimizer_of(ddp), nn.CrossEntropyLoss()
    try:
        with Pace(ddp, 60, policy, loop="pieces") as pace:
            for x, y, _ in pace.loader(Samples(60 * 6), seed=5):
                if rank == who and pace.rounds == 2:
                    raise KeyError("no such image")
                pace.backward(loss_of(ddp(x), y))
                pace.step(optimizer)
    except PacelineError as error:
        return str(error)
    except KeyError:
        return "KeyError"
    return "nothing"
