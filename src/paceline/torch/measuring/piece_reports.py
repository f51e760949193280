"""What the ranks tell each other of a round that was run in pieces."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from paceline.pieces.rule import Counts
from paceline.pieces.times import against_the_first, piece_cost
from paceline.rounds import Array, PieceTimes
from paceline.torch.measuring.exchange import Rows

PIECES = 16  # of a round on record for each rank; what follows is added to the last
FIRST_COST = 1e-3  # seconds of a piece beyond its samples, until measured
ROW = np.dtype(
    [
        ("samples", "f8"),  # that the rank ran
        ("cost", "f8"),  # seconds of a piece beyond its samples
        ("pieces", "f8"),  # how many
        ("sizes", "f8", (PIECES,)),  # samples of each
        ("times", "f8", (PIECES,)),  # and seconds
    ]
)


class PieceReports(NamedTuple):
    """All ranks' reports of a round; arrays of shape (n,), lists of one entry a rank."""

    loads: Counts
    cost: Array  # seconds of a piece beyond its samples
    counts: Counts
    pieces: list[list[int]]
    seconds: list[list[float]]

    @classmethod
    def of(cls, rows: Rows) -> PieceReports:
        """From every rank's ROW, shape (n,)."""
        counts = rows["pieces"].astype(np.int64)
        sizes, times = [], []
        for count, own, took in zip(counts.tolist(), rows["sizes"], rows["times"], strict=True):
            sizes.append([int(samples) for samples in own[:count].tolist()])  # no more than PIECES of each
            times.append([round(seconds, 6) for seconds in took[:count].tolist()])
        return cls(rows["samples"].astype(np.int64), rows["cost"], counts, sizes, times)

    def times(self) -> PieceTimes:
        """What the ranks' pieces cost, and how far claims strayed from what the first pieces promised."""
        both = [against_the_first(*each) for each in zip(self.pieces, self.seconds, self.cost, strict=True)]
        return PieceTimes(self.cost, *np.array(both, float).T)


def report(sizes: Sequence[int], seconds: Sequence[float], piece: float) -> list[float]:
    """One rank's ROW, number by number. piece: seconds that each costs beyond its samples."""
    numbers = [float(sum(sizes)), piece, float(len(sizes))]
    for each in (sizes, seconds):
        known = (*each[: PIECES - 1], sum(each[PIECES - 1 :])) if len(each) >= PIECES else each
        numbers += [*known, *([0.0] * (PIECES - len(known)))]
    return numbers


def cost(sizes: Sequence[int], seconds: Sequence[float], before: float) -> float:
    """Seconds of a piece beyond its samples, after a round's pieces; the last one waited for a reduction."""
    return piece_cost(sizes[:-1], seconds[:-1], before)
