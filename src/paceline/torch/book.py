"""What the ranks tell each other of a round that was run in pieces."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from paceline.balance.factoring import Counts
from paceline.rounds import Array

PIECES = 16  # of a round on record for each rank; what follows is added to the last
FIRST_COST = 1e-3  # seconds of a piece beyond its samples, until measured
COST_STEP = 1.1  # factor by which that follows each round's measurement: a running median


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


def report(sizes: Sequence[int], seconds: Sequence[float], piece: float) -> Array:
    """One rank's row of a book, shape (width(),). piece: seconds that each costs beyond its samples."""
    values = np.zeros(width())
    values[:3] = sum(sizes), piece, len(sizes)
    for number, (samples, took) in enumerate(zip(sizes, seconds, strict=True)):
        at = min(number, PIECES - 1)
        values[3 + at] += samples
        values[3 + PIECES + at] += took
    return values


def cost(sizes: Sequence[int], seconds: Sequence[float], before: float) -> float:
    """Seconds of a piece beyond its samples, after a round's pieces: from the largest and the smallest of those
    that did not wait for a reduction. One round's is noisy, so the estimate only takes a step towards it."""
    if len(sizes) < 3:
        return before
    large, small = int(np.argmax(sizes[:-1])), int(np.argmin(sizes[:-1]))
    if sizes[large] < 2 * sizes[small]:
        return before
    found = (seconds[small] * sizes[large] - seconds[large] * sizes[small]) / (sizes[large] - sizes[small])
    return float(np.clip(before * COST_STEP if found > before else before / COST_STEP, 5e-5, 1.0))
