"""What ranks do while one of them is stopped, late, or fails."""

from __future__ import annotations

import time

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from paceline.errors import PacelineError, WorkerError
from paceline.torch import Pace, Stall
from paceline.torch.exchange import GroupExchange, MemoryExchange
from paceline.torch.liveness import stall
from paceline.torch.liveness.stall import Missing
from support.events import Events
from support.torch_jobs import Samples, fresh, optimizer_of

ROW = np.dtype([("told", "f8"), ("more", "f8")])


def stopped(rank: int, ranks: int, cases: list[tuple[int, int, str]], folder: str) -> list[list[Missing]]:
    """For each case (who, when, policy): whom this rank misses while rank ``who`` is stopped in round ``when``, until
    all others have missed it."""
    events = Events(folder)
    return [_stopped(rank, ranks, events, number, *case) for number, case in enumerate(cases)]


def _stopped(
    rank: int, ranks: int, events: Events, number: int, who: int, when: int, policy: str
) -> list[Missing]:
    ddp = DistributedDataParallel(fresh(torch.float64))
    optimizer, loss_of = optimizer_of(ddp), nn.CrossEntropyLoss()
    seen: list[Missing] = []

    def missed(missing: Missing) -> None:
        seen.append(missing)
        if (missing.round, missing.ranks, missing.lives) == (when, [who], False):
            events.tell(f"{number} {rank}")

    pace = Pace(ddp, 60, policy, loop="pieces", stall=Stall(missed, 0.8))
    for x, y, _ in pace.loader(Samples(60 * 4), seed=5):
        if rank == who and pace.rounds == when and pace.host.first:
            events.stop(*(f"{number} {other}" for other in range(ranks) if other != who))
        pace.backward(loss_of(ddp(x), y))
        pace.step(optimizer)
    pace.host.detach()
    return seen


def late(rank: int, ranks: int, folder: str) -> list[Missing]:
    """Whom this rank misses while rank 1 is before its first backward pass, until the others have missed it."""
    stall.LIVING = 1.5
    ddp = DistributedDataParallel(fresh(torch.float64))
    optimizer, loss_of = optimizer_of(ddp), nn.CrossEntropyLoss()
    events, seen = Events(folder), list[Missing]()

    def missed(missing: Missing) -> None:
        seen.append(missing)
        if (missing.round, missing.ranks, missing.lives) == (0, [1], True):
            events.tell(str(rank))

    with Pace(ddp, 60, "equal", stall=Stall(missed, 1.0)) as pace:
        for x, y, _ in pace.loader(Samples(60 * 2), seed=5):
            if rank == 1 and pace.rounds == 0:
                events.wait("0", "2")
            pace.backward(loss_of(ddp(x), y))
            pace.step(optimizer)
    return seen


def unreduced(state: None, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """A hook that waits for nobody, as the host does where a device reduces."""
    done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    done.set_result(bucket.buffer())
    return done


# torch looks at the types themselves, not at their names.
unreduced.__annotations__.update(bucket=dist.GradBucket, **{"return": torch.futures.Future[torch.Tensor]})


def failing(rank: int, ranks: int, who: int, policy: str, ahead: bool = False) -> str:
    """The sentence, or the kind of error, with which this rank ends when rank ``who`` fails in round 2.

    ahead: hosts run ahead of the reductions, and meet in their reports only.
    """
    ddp = DistributedDataParallel(fresh(torch.float64))
    if ahead:
        ddp.register_comm_hook(None, unreduced)
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


def limits_of_waiting(rank: int, ranks: int, folder: str) -> tuple[float, list[str]]:
    """For how long the process group waits, and the sentences of rank 1 where rank 0 is late, and where it is stopped
    for longer than that."""
    sentences, events = [], Events(folder)
    for kind in (MemoryExchange.of_all, GroupExchange):
        for hindrance in (events.wait, events.stop):
            exchange = kind(ROW)
            assert exchange is not None
            exchange.send(7, np.ones((), ROW))
            exchange.receive(7)
            over = f"{kind.__name__} {hindrance.__name__}"
            dist.barrier()
            if rank == 0:
                hindrance(over)
                exchange.send(8, np.ones((), ROW))
            else:
                exchange._timeout = 0.5
                exchange.send(8, np.ones((), ROW))
                try:
                    exchange.receive(8)
                except WorkerError as error:
                    sentences.append(str(error))
                events.tell(over)
            dist.barrier()
            exchange.close()
    exchange = MemoryExchange.of_all(ROW)
    assert exchange is not None
    exchange.send(0, np.array((rank, 1.0), ROW))
    assert exchange.receive(0)["told"].tolist() == [0.0, 1.0]
    if rank == 0:
        time.sleep(2.0)  # on a device the other would go on by itself
    exchange.send(1, np.array((2.0 + rank, 1.0), ROW))
    assert exchange.receive(1)["told"].tolist() == [2.0, 3.0]
    exchange.close()
    return exchange._timeout, sentences
