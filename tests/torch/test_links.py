"""Each rank's own link is measured once, if sums take long, and at the same round on all ranks."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from paceline.torch import Pace, decisions, peers
from paceline.torch.callbacks import OnRound
from support.guarantees import guarantee
from support.ranks import run_ranks
from support.small_net import Samples, fresh, optimizer_of

pytestmark = pytest.mark.processes

LATE = 100.0  # seconds; no message takes as long


def slow_link(rank: int, ranks: int, slow: int) -> list[float] | None:
    """What the ranks find if whatever goes to or comes from one of them takes ``LATE`` by their clocks."""
    send, recv, added = dist.send, dist.recv, [0.0]

    def late(function: Any) -> Any:
        def call(message: torch.Tensor, peer: int) -> Any:
            result = function(message, peer)
            if slow in (rank, peer) and message.numel() > 1:
                added[0] += LATE
            return result

        return call

    dist.send, dist.recv = late(send), late(recv)
    peers.time = SimpleNamespace(perf_counter=lambda: time.perf_counter() + added[0])  # type: ignore[assignment]
    found = peers.links()
    dist.send, dist.recv, peers.time = send, recv, time
    return None if found is None else found.tolist()


@guarantee("A rank with a slow link is named; links are measured once, and only if sums take long.")
def test_slow_link_differs_from_those_of_its_peers() -> None:
    for slow in (0, 2):
        first, *others = run_ranks(4, slow_link, slow)
        assert first is not None
        assert all(other == first for other in others)
        assert first[slow] > 2 * LATE  # on the way there and on the way back
        assert max(link for rank, link in enumerate(first) if rank != slow) < LATE


def test_two_ranks_have_no_link_of_their_own() -> None:
    assert run_ranks(2, slow_link, 0) == [None, None]


def asked(rank: int, ranks: int, share: float, alone: bool = False) -> list[Any]:
    """The links told of after each of some rounds of 50 ms, if sums of more than this part of that are long. alone:
    rank 0 makes a checkpoint after each, and so settles it before the others do."""
    decisions.LONG_SUM = share
    ddp = DistributedDataParallel(fresh(torch.float64))
    optimizer = optimizer_of(ddp)
    told: list[Any] = []
    pace = Pace(ddp, 12, "equal", callbacks=[OnRound(told.append)])
    loader = pace.loader(Samples(12 * 30))
    for x, y, _ in loader:
        time.sleep(0.05)
        pace.backward(torch.nn.functional.cross_entropy(ddp(x), y))
        if pace.step(optimizer) and alone and rank == 0:
            pace.state_dict()
    pace.host.flush()
    pace.close()
    return [None if each.links is None else each.links.tolist() for each in told]


@guarantee("A rank with a slow link is named; links are measured once, and only if sums take long.")
def test_links_are_measured_once_and_only_if_sums_take_long() -> None:
    for alone in (False, True):
        first, *others = run_ranks(3, asked, 0.0, alone, seconds=120)
        assert all(other == first for other in others)
        assert [len(links) for links in first if links is not None] == [3]
    for told in run_ranks(3, asked, 1e3):
        assert told == [None] * 30
