"""Ranks that are stopped, late, fail or are killed: the others name them. Real processes on a real gloo group."""

from __future__ import annotations

import re
import time
from pathlib import Path

import numpy as np
import pytest
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
from support.forks import as_torchrun, ended
from support.guarantees import guarantee
from support.ranks import WAITS, run_cases, run_ranks
from support.small_net import Samples, fresh, optimizer_of

pytestmark = pytest.mark.processes


def stopped(rank: int, ranks: int, folder: str, name: str, who: int, when: int, policy: str) -> list[Missing]:
    """Whom this rank misses while rank ``who`` is stopped in round ``when``, until all others have missed it."""
    events = Events(folder)
    ddp = DistributedDataParallel(fresh(torch.float64))
    optimizer, loss_of = optimizer_of(ddp), nn.CrossEntropyLoss()
    seen: list[Missing] = []

    def missed(missing: Missing) -> None:
        seen.append(missing)
        if (missing.round, missing.ranks, missing.lives) == (when, [who], False):
            events.tell(f"{name} {rank}")

    pace = Pace(ddp, 60, policy, loop="pieces", stall=Stall(missed, 0.8))
    for x, y, _ in pace.loader(Samples(60 * 4), seed=5):
        if rank == who and pace.rounds == when and pace.host.first:
            events.stop(*(f"{name} {other}" for other in range(ranks) if other != who))
        pace.backward(loss_of(ddp(x), y))
        pace.step(optimizer)
    pace.host.detach()
    return seen


@guarantee(
    "A silent rank is named after `patience` seconds (30) and after twice the time, under every policy; a "
    "late rank is named as late."
)
def test_stopped_rank_is_named_under_every_policy(tmp_path: Path) -> None:
    """Also rank 0, which hosts what the ranks tell each other: every call to it hangs meanwhile."""
    cases = {
        f"{who} {when} {policy}": {"folder": str(tmp_path), "who": who, "when": when, "policy": policy}
        for who, when, policy in ((0, 0, "equal"), (1, 0, "factoring"), (2, 2, "level"), (0, 2, "factoring"))
    }
    found = run_cases(3, stopped, {name: case | {"name": name} for name, case in cases.items()})
    for name, told in found.items():
        who, when = cases[name]["who"], cases[name]["when"]
        for rank in {0, 1, 2} - {who}:
            assert (when, [who]) in [(m.round, m.ranks) for m in told[rank] if not m.lives], (name, rank)


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


@guarantee(
    "A silent rank is named after `patience` seconds (30) and after twice the time, under every policy; a "
    "late rank is named as late."
)
def test_late_rank_is_named_as_late(tmp_path: Path) -> None:
    first, slow, third = run_ranks(3, late, str(tmp_path))
    for told in (first, third):
        assert (0, [1]) in [(missing.round, missing.ranks) for missing in told if missing.lives]
    assert not [missing for missing in slow if missing.lives]


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


@guarantee(
    "If a rank raises, leaves or is killed, the others end with a `WorkerError` that names it, as far as "
    "known within 4 s."
)
@pytest.mark.parametrize(
    ("who", "policy", "ahead"), [(0, "level", False), (2, "factoring", False), (2, "level", True)]
)
def test_failed_rank_is_named_with_its_error_on_the_others(who: int, policy: str, ahead: bool) -> None:
    """Also where no connection breaks: on a device, hosts wait for the failed one's report only."""
    told = run_ranks(3, failing, who, policy, ahead)
    for rank, words in enumerate(told):
        if rank == who:
            assert words == "KeyError", "its own error is its own"
        else:
            start = f"rank {who} failed in round 2: KeyError: 'no such image'; rank {rank} cannot continue"
            assert words.startswith(start)


ROW = np.dtype([("told", "f8"), ("more", "f8")])


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


@guarantee("Reports and claims are waited for as long as the process group waits.")
def test_reports_are_waited_for_as_long_as_the_process_group_waits(tmp_path: Path) -> None:
    (waits, none), (_, sentences) = run_ranks(2, limits_of_waiting, str(tmp_path))
    assert waits == WAITS
    assert none == []
    assert len(sentences) == 4  # where rank 0 is late, or stopped, in memory and in a collective
    for who, sentence in zip(["rank 0"] * 2 + ["another rank"] * 2, sentences, strict=True):
        assert re.match(
            rf"{who} has not reported its round \d+ s after rank 1 did, as long as the process", sentence
        )


ALONE = """
import sys

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from paceline.torch import Pace, Stall, join, peers
from support.small_net import Samples, fresh, optimizer_of

join()
torch.set_num_threads(1)
ddp = DistributedDataParallel(fresh(torch.float64))
optimizer, loss_of = optimizer_of(ddp), nn.CrossEntropyLoss()
pace = Pace(ddp, 20, "level", stall=Stall(patience=float(sys.argv[2])))
for x, y, _ in pace.loader(Samples(20 * 6), seed=5):
    if peers.rank() == 1 and pace.rounds == 2:
        if sys.argv[1] == "raise":
            raise ValueError("a bad image\\nand more")
        sys.exit(3)
    pace.backward(loss_of(ddp(x), y))
    pace.step(optimizer)
"""


@guarantee(
    "If a rank raises, leaves or is killed, the others end with a `WorkerError` that names it, as far as "
    "known within 4 s."
)
@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("raise", "rank 1 failed in round 2: ValueError: a bad image"),
        ("exit", "rank 1 has ended its program"),
    ],
)
def test_program_that_ends_alone_is_named_by_the_others(how: str, words: str, tmp_path: Path) -> None:
    """Nobody said ``with``: the error is one that nobody catches."""
    script = tmp_path / "train.py"
    script.write_text(ALONE)
    both = ended(as_torchrun(2), [script, how, "30"], whole=True)
    (status, _, first), (other_status, _, second) = both
    assert status == 1
    assert other_status == (1 if how == "raise" else 3), second
    assert words in first.strip().splitlines()[-1]
    assert "rank 0 cannot continue without it" in first
    assert ("ValueError: a bad image" in second) == (how == "raise")
    assert "SIGABRT" not in first + second
