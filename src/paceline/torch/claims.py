"""Claims within a round: one atomic counter that all ranks add to, and this rank's book of what it ran.

The counter holds two numbers in one: how many samples of the pool have been claimed, and by how much the ranks
run faster or slower in this round than was expected of them all. So one round trip tells a rank what is left and
what its part of it should be. Whatever the ranks believe, each sample is handed out once: the counter decides.
"""

from __future__ import annotations

import os
import time
from datetime import timedelta
from typing import NamedTuple, Protocol

import numpy as np
import torch
import torch.distributed as dist

from paceline.balance.factoring import Counts, size
from paceline.rounds import Array, Pull
from paceline.torch import peers

PIECES = 16  # of a round on record for each rank; what follows is added to the last
HALF = 28  # bits of the counter for the samples; the other 35 are for the speeds
SPEED_UNITS = 1 << 20  # of the expected speed of all
MOST_SPEED = 16.0  # times that, told by one rank: a plan made from a stall may be that wrong
FIRST_COST = 1e-3  # seconds of a piece beyond its samples, until measured
COST_STEP = 1.1  # factor by which that follows each round's measurement: a running median


class Division(NamedTuple):
    """How one round begins; the same on every rank."""

    step: int
    first: Counts  # samples that each rank runs at once, (n,)
    kept: Counts  # that it keeps for its end, (n,)
    start: int  # of the pool, among the epoch's samples
    pool: int  # samples to claim
    pull: Pull


class Counter(Protocol):
    """Adds to a number that all ranks share, and returns the sum before it."""

    def add(self, step: int, samples: int, speed: int) -> tuple[int, int]: ...

    def close(self) -> None: ...


class LocalCounter:
    """One process: nobody to share with."""

    def __init__(self) -> None:
        self._step, self._samples, self._speed = -1, 0, 0

    def add(self, step: int, samples: int, speed: int) -> tuple[int, int]:
        if step != self._step:
            self._step, self._samples, self._speed = step, 0, 0
        before = self._samples, self._speed
        self._samples, self._speed = self._samples + samples, self._speed + speed
        return before[0], self._speed

    def close(self) -> None:
        pass


class StoreCounter:
    """On a TCPStore of its own, which rank 0 hosts; a key a round, deleted two rounds later."""

    def __init__(self, rank: int, ranks: int, timeout: float = 60.0) -> None:
        self._rank = rank
        wait = timedelta(seconds=timeout)
        self._store: dist.TCPStore | None = None
        address: list[object] = [None]
        if rank == 0:
            host = os.environ.get("MASTER_ADDR", "127.0.0.1")
            self._store = dist.TCPStore(host, 0, ranks, True, wait_for_workers=False, timeout=wait)
            address = [(host, self._store.port)]
        dist.broadcast_object_list(address, src=0)
        if rank != 0:
            there: tuple[str, int] = address[0]  # type: ignore[assignment]
            self._store = dist.TCPStore(*there, ranks, False, wait_for_workers=False, timeout=wait)
        self._newest = -1

    def add(self, step: int, samples: int, speed: int) -> tuple[int, int]:
        assert self._store is not None
        if step != self._newest:
            self._newest = step
            if self._rank == 0:  # everybody has left that round: its gradients have been reduced
                self._store.delete_key(str(step - 2))
        after = self._store.add(str(step), samples + (speed << HALF))
        return (after & ((1 << HALF) - 1)) - samples, after >> HALF

    def close(self) -> None:
        self._store = None


def counter() -> Counter:
    """The counter that suits the process group. Collective."""
    return StoreCounter(peers.rank(), peers.ranks()) if peers.ranks() > 1 else LocalCounter()


class Claims:
    """This rank's part in the rounds that are run in pieces.

    unit: pieces are multiples of this many samples. largest: samples that fit into memory at once; most: that
    this rank may take in a round.
    """

    def __init__(self, device: torch.device, unit: int, largest: int | None, most: int) -> None:
        self._counter = counter()
        self._rank, self._ranks = peers.rank(), peers.ranks()
        self._device, self._unit, self._most = device, unit, most
        self._largest = most if largest is None else largest
        self._cost = FIRST_COST
        self._division: Division | None = None
        self._told = 0
        self._began = self._mark = 0.0
        self._sizes: list[int] = []
        self._seconds: list[float] = []

    def open(self, began: float) -> None:
        """A round begins."""
        self._division, self._told = None, 0
        self._began = self._mark = began
        self._sizes, self._seconds = [], []

    def done(self, samples: int, last: bool = False) -> None:
        """A piece is through; on a GPU, wait for it first, since what is claimed next depends on when."""
        if self._device.type == "cuda" and not last:
            torch.cuda.current_stream(self._device).synchronize()
        now = time.perf_counter()
        self._sizes.append(samples)
        self._seconds.append(now - self._mark)
        self._mark = now

    def take(self, division: Division) -> tuple[int, int] | None:
        """(start among the epoch's samples, size) of this rank's next piece; None when nothing is left for it."""
        rank, pull, unit = self._rank, division.pull, self._unit
        taken = sum(self._sizes)
        room = min(self._largest, self._most - taken - int(division.kept[rank])) // unit * unit
        if room <= 0:
            return None
        expected, together = float(pull.speeds[rank]), float(pull.speeds.sum())
        busy = time.perf_counter() - self._began - self._cost * len(self._sizes)
        speed = taken / busy if taken and busy > 0 else expected
        known = together > 0
        told = round(min((speed - expected) / together, MOST_SPEED) * SPEED_UNITS) if known else 0
        claimed, difference = self._counter.add(division.step, 0, told - self._told)
        self._told = told
        left = division.pool - claimed
        if left <= 0:
            return None
        everyone = together * max(1.0 + difference / SPEED_UNITS, 1e-6)
        weight = min(speed / everyone, 1.0) if known else 1.0 / self._ranks
        slower = min(1.0, speed / expected) if expected > 0 else 1.0
        wanted = int(
            size(
                np.asarray(pull.part),
                np.asarray(division.pool),
                np.asarray(left),
                np.asarray(weight),
                np.asarray(max(1.0, float(pull.least[rank]) * slower)),
                unit,
            )
        )
        wanted = min(wanted, room)
        before, _ = self._counter.add(division.step, wanted, 0)
        if before >= division.pool:
            return None
        return division.start + before, min(wanted, division.pool - before)

    def report(self) -> Array:
        """What the other ranks should know: samples run, seconds that a piece costs, pieces, each one's samples
        and seconds. Shape (3 + 2 PIECES,)."""
        self._cost = _cost(self._sizes, self._seconds, self._cost)
        values = np.zeros(width())
        values[:3] = sum(self._sizes), self._cost, len(self._sizes)
        for number, (samples, seconds) in enumerate(zip(self._sizes, self._seconds, strict=True)):
            at = min(number, PIECES - 1)
            values[3 + at] += samples
            values[3 + PIECES + at] += seconds
        return values

    def close(self) -> None:
        self._counter.close()


class Within(NamedTuple):
    """How a round was run in pieces; lists of one entry a rank.

    at_once: portion of the plan that was run before anything was claimed; 1 where all of it was.
    cost: seconds of a piece beyond its samples, mean over the ranks.
    pieces: samples of each rank's pieces. seconds: how long each took.
    """

    at_once: float
    cost: float
    pieces: list[list[int]]
    seconds: list[list[float]]


class Book(NamedTuple):
    """All ranks' reports of a round; arrays of shape (n,), lists of one entry a rank."""

    loads: Counts
    cost: Array  # seconds of a piece beyond its samples
    counts: Counts
    pieces: list[list[int]]
    seconds: list[list[float]]

    @classmethod
    def of(cls, rows: Array) -> Book:
        """From the reports' numbers, shape (n, width())."""
        counts = rows[:, 2].astype(np.int64)
        kept = np.minimum(counts, PIECES)
        samples, seconds = rows[:, 3 : 3 + PIECES], rows[:, 3 + PIECES :]
        return cls(
            rows[:, 0].astype(np.int64),
            rows[:, 1],
            counts,
            [[int(s) for s in row[:k]] for row, k in zip(samples, kept, strict=True)],
            [[round(float(s), 6) for s in row[:k]] for row, k in zip(seconds, kept, strict=True)],
        )


def width() -> int:
    """Numbers in a report."""
    return 3 + 2 * PIECES


def _cost(sizes: list[int], seconds: list[float], before: float) -> float:
    """Seconds of a piece beyond its samples, after a round's pieces: from the largest and the smallest of those
    that did not wait for a reduction. One round's is noisy, so the estimate only takes a step towards it."""
    if len(sizes) < 3:
        return before
    large, small = int(np.argmax(sizes[:-1])), int(np.argmin(sizes[:-1]))
    if sizes[large] < 2 * sizes[small]:
        return before
    found = (seconds[small] * sizes[large] - seconds[large] * sizes[small]) / (sizes[large] - sizes[small])
    return float(np.clip(before * COST_STEP if found > before else before / COST_STEP, 5e-5, 1.0))
