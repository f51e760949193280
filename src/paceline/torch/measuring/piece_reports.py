"""What the ranks tell each other of a round that was run in pieces."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from paceline.pieces.rule import Counts
from paceline.pieces.times import against_the_first, piece_cost
from paceline.rounds import Array, PieceTimes

PIECES = 16  # of a round on record for each rank; what follows is added to the last
FIRST_COST = 1e-3  # seconds of a piece beyond its samples, until measured


class PieceReports(NamedTuple):
    """All ranks' reports of a round; arrays of shape (n,), lists of one entry a rank."""

    loads: Counts
    cost: Array  # seconds of a piece beyond its samples
    counts: Counts
    pieces: list[list[int]]
    seconds: list[list[float]]

    @classmethod
    def of(cls, rows: Array) -> PieceReports:
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

    def times(self) -> PieceTimes:
        """What the ranks' pieces cost, and how far claims strayed from what the first pieces promised."""
        both = [against_the_first(*each) for each in zip(self.pieces, self.seconds, self.cost, strict=True)]
        return PieceTimes(self.cost, *np.array(both, float).T)


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
    """Seconds of a piece beyond its samples, after a round's pieces; the last one waited for a reduction."""
    return piece_cost(sizes[:-1], seconds[:-1], before)
