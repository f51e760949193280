"""The ranks' rows through memory that they share."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import numpy as np
import pytest

from paceline.torch import exchange
from support.events import until
from support.guarantees import guarantee
from support.ranks import run_ranks

pytestmark = pytest.mark.processes

ROW = np.dtype([("number", "f8")])


def row(number: float) -> np.ndarray:
    return np.array((number,), ROW)


def connected() -> exchange.MemoryExchange:
    found = exchange.MemoryExchange.of_all(ROW, timeout=400)
    assert found is not None
    return found


def a_rank_that_is_late(rank: int, ranks: int, place: Path, after: int, reads: bool) -> list[float]:
    """Rank 0 receives round 0, and sends another in the same slot. Rank 1 receives round 0 when it has seen that or,
    since that waits for it, after a while; or it ends (unless ``reads``)."""
    rows = connected()
    rows.send(0, row(10 + rank))
    if rank == 0:
        found = rows.receive(0)
        sends = threading.Thread(target=lambda: (rows.send(after, row(after)), (place / "sent").touch()))
        sends.start()
        (place / "sends").touch()
        sends.join()
    else:
        until((place / "sends").exists)
        for _ in range(20):
            if (place / "sent").exists():
                break
            threading.Event().wait(0.01)
        if not reads:
            rows.close()
            return []
        found = rows.receive(0)
    if reads:
        rows.send(after, row(after + rank))
        found = np.concatenate([found, rows.receive(after)])
    until((place / "sent").exists)
    return found["number"].tolist()


@guarantee(
    "Ranks that run ahead, as with parameters that are averaged now and then, take no late rank its reports."
)
@pytest.mark.parametrize("after", [exchange.SLOTS, 3 * exchange.SLOTS, exchange.SLOTS + 1])
def test_row_stays_until_the_last_rank_has_read_it(tmp_path: Path, after: int) -> None:
    for numbers in run_ranks(2, a_rank_that_is_late, tmp_path, after, True):
        assert numbers == [10, 11, after, after + 1]


def test_rank_that_has_ended_is_not_waited_for(tmp_path: Path) -> None:
    assert run_ranks(2, a_rank_that_is_late, tmp_path, exchange.SLOTS, False) == [[10, 11], []]


def rounds_that_are_left(rank: int, ranks: int, place: Path) -> list[float]:
    """Rank 0 receives each fourth round, which rank 1 leaves after it was sent; both go on."""
    rows, found = connected(), list[float]()
    for step in range(0, 6 * exchange.SLOTS, exchange.SLOTS):
        rows.send(step, row(step + rank))
        if rank == 0:
            found += rows.receive(step)["number"].tolist()
            (place / str(step)).touch()
        until((place / str(step)).exists)
    rows.send(100, row(rank))
    return found + rows.receive(100)["number"].tolist()


def test_rank_that_has_sent_a_later_row_needs_no_earlier_one(tmp_path: Path) -> None:
    first, second = run_ranks(2, rounds_that_are_left, tmp_path)
    assert first[-2:] == second == [0, 1]


def rank_that_sees_no_other(rank: int, ranks: int) -> list[int]:
    """The last rank is on another machine, so that the ranks cannot share memory: the open files before and after."""
    if rank == ranks - 1:
        exchange.shared_memory.find = lambda *_: None
    before = len(os.listdir("/proc/self/fd"))
    assert exchange.MemoryExchange.of_all(ROW) is None
    return [before, len(os.listdir("/proc/self/fd"))]


def test_ranks_without_shared_memory_keep_no_files_open() -> None:
    for before, after in run_ranks(3, rank_that_sees_no_other):
        assert after == before
