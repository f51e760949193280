"""Groups beside the default one are used again, as long as all ranks have ended their collectives on them."""

from __future__ import annotations

import os

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

from paceline.torch import exchange, peers
from paceline.torch.local import Merge, Merging
from support.ranks import run_ranks

pytestmark = pytest.mark.processes

GUARANTEES = (
    "However many handles and streams a program makes and closes, it holds no more threads and connections than with "
    "one.",
)
ROW = np.dtype([("number", "f8")])
HANDLES = 4


def row(number: float) -> np.ndarray:
    return np.array((number,), ROW)


def held() -> tuple[int, int]:
    """The open files and the threads of this process."""
    return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))


def exchanges_one_after_the_other(rank: int, ranks: int) -> list[tuple[list[float], tuple[int, int]]]:
    found = []
    for number in range(HANDLES):
        rows = exchange.GroupExchange(ROW)
        rows.send(0, row(10 * number + rank))
        received = rows.receive(0)["number"].tolist()
        rows.close()
        rows.close()
        found.append((received, held()))
    return found


def test_exchanges_one_after_the_other_hold_what_one_holds() -> None:
    for found in run_ranks(2, exchanges_one_after_the_other):
        rows, holds = zip(*found, strict=True)
        assert list(rows) == [[10 * number, 10 * number + 1] for number in range(HANDLES)]
        assert set(holds[1:]) == {holds[0]}


def delayed_merges_one_after_the_other(rank: int, ranks: int) -> list[tuple[int, int]]:
    found, total = [], torch.zeros(1)
    for _ in range(HANDLES):
        merging = Merging(nn.Linear(1, 1), ranks)
        merging.connect(Merge(delay=1))
        total.fill_(rank + 1)
        merging.summing(None)([total])
        assert total.item() == 3
        merging.close()
        merging.close()
        found.append(held())
    return found


def test_delayed_merges_one_after_the_other_hold_what_one_holds() -> None:
    for holds in run_ranks(2, delayed_merges_one_after_the_other):
        assert set(holds[1:]) == {holds[0]}


def exchanges_at_a_time(rank: int, ranks: int) -> list[list[float]]:
    """The first leaves a free group, of which one of the others is made; the ranks send in different order."""
    exchange.GroupExchange(ROW).close()
    both = [exchange.GroupExchange(ROW) for _ in range(2)]
    for number in (rank, 1 - rank):
        both[number].send(0, row(10 * number + rank))
    return [one.receive(0)["number"].tolist() for one in both]


def test_exchanges_at_a_time_have_groups_of_their_own() -> None:
    assert run_ranks(2, exchanges_at_a_time) == [[[0, 1], [10, 11]]] * 2


def exchange_after_a_round_that_one_rank_left(rank: int, ranks: int) -> list[float]:
    """Rank 0 has sent a round that rank 1 has not: the next exchange on the same group would receive it."""
    left = exchange.GroupExchange(ROW)
    if rank == 0:
        left.send(0, row(99))
    left.close()
    rows = exchange.GroupExchange(ROW)
    rows.send(0, row(rank))
    return list(rows.receive(0)["number"].tolist())


def test_group_whose_round_one_rank_left_is_not_used_again() -> None:
    assert run_ranks(2, exchange_after_a_round_that_one_rank_left) == [[0, 1]] * 2


def exchange_in_a_new_world(rank: int, ranks: int) -> list[float]:
    old = exchange.GroupExchange(ROW)
    old.close()
    store = peers.own_store(60.0)
    dist.destroy_process_group()
    dist.init_process_group("gloo", store=dist.PrefixStore("again", store), rank=rank, world_size=ranks)
    rows = exchange.GroupExchange(ROW)
    rows.send(0, row(rank))
    found = rows.receive(0)["number"].tolist()
    dist.barrier()  # rank 0 hosts the store
    return list(found)


def test_group_of_a_process_group_that_was_destroyed_is_not_used_again() -> None:
    assert run_ranks(2, exchange_in_a_new_world) == [[0, 1]] * 2
