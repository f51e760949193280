"""The ranks' reports to each other of a round that was run in pieces."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from paceline.pieces.rule import Counts, against_the_first, piece_cost
from paceline.rounds import Array, PieceTimes
from paceline.samples import Deal
from paceline.samples.cost import batch_parts
from paceline.torch.exchange import Rows
from paceline.torch.plan import Division

PIECES = 16  # of a round that each rank reports; later ones are added to the last
FIRST_COST = 1e-3  # seconds of a piece beyond its samples, until measured
ROW = np.dtype(
    [
        ("samples", "f8"),  # that the rank ran
        ("cost", "f8"),  # seconds of a piece beyond its samples
        ("pieces", "f8"),  # number of pieces
        ("parts", "f8", (3,)),  # the samples' summed parts, see ``Deal.parts``, if samples cost differently
        ("sizes", "f8", (PIECES,)),  # samples of each piece
        ("amounts", "f8", (PIECES,)),  # the same, or their cost if samples cost differently
        ("times", "f8", (PIECES,)),  # seconds of each piece
    ]
)


class PieceReports(NamedTuple):
    """All ranks' reports of a round; arrays of shape (n,), lists of one entry a rank."""

    loads: Counts
    cost: Array  # seconds of a piece beyond its samples
    counts: Counts
    parts: Array  # (n, 3)
    pieces: list[list[int]]
    amounts: list[list[float]]
    seconds: list[list[float]]

    @classmethod
    def of(cls, rows: Rows) -> PieceReports:
        """Read the reports from every rank's ROW, shape (n,)."""
        counts = rows["pieces"].astype(np.int64)
        many = counts.tolist()
        sizes, amounts, times = [], [], []
        columns = (rows[name][:, : max(many)].tolist() for name in ("sizes", "amounts", "times"))
        for count, own, much, took in zip(many, *columns, strict=True):
            sizes.append([int(samples) for samples in own[:count]])  # no more than PIECES of each
            amounts.append(much[:count])
            times.append([round(seconds, 6) for seconds in took[:count]])
        return cls(
            rows["samples"].astype(np.int64), rows["cost"], counts, rows["parts"], sizes, amounts, times
        )

    def times(self) -> PieceTimes:
        """The cost of the ranks' pieces, and how far claims deviated from what the first pieces predicted."""
        if max(map(len, self.pieces)) < 3:  # no rank has claimed anything
            nothing = np.zeros(len(self.cost))
            return PieceTimes(self.cost, nothing, nothing)
        both = [against_the_first(*each) for each in zip(self.amounts, self.seconds, self.cost, strict=True)]
        return PieceTimes(self.cost, *np.array(both, float).T)

    def before_claims(self, deal: Deal, division: Division) -> tuple[Array, Array]:
        """The parts (``Deal.parts``) that each rank ran before its claims, (n, 3), and their seconds or NaN, (n,)."""
        parts, seconds = np.zeros((len(self.loads), 3)), np.full(len(self.loads), np.nan)
        for rank, (sizes, took) in enumerate(zip(deal.sizes, self.seconds, strict=True)):
            own = sizes[:-1] if division.kept[rank] else sizes
            own = own[: min(len(took), PIECES) - 1]  # the last number is the sum over all later pieces
            if len(own) and own.sum():
                start = deal.starts[rank]
                parts[rank] = batch_parts(deal.lengths[start : start + own.sum()], own, deal.model.padded)
                seconds[rank] = sum(took[: len(own)])
        return parts, seconds


def report(
    sizes: Sequence[int],
    seconds: Sequence[float],
    piece: float,
    amounts: Sequence[float] | None = None,
    parts: Sequence[float] = (0.0, 0.0, 0.0),
) -> list[float]:
    """The numbers of one rank's ROW, in order. piece: seconds that each piece costs beyond its samples. amounts,
    parts: given if samples cost differently."""
    numbers = [float(sum(sizes)), piece, float(len(sizes)), *parts]
    for each in (sizes, sizes if amounts is None else amounts, seconds):
        known = (*each[: PIECES - 1], sum(each[PIECES - 1 :])) if len(each) >= PIECES else each
        numbers += [*known, *([0.0] * (PIECES - len(known)))]
    return numbers


def cost(sizes: Sequence[float], seconds: Sequence[float], before: float) -> float:
    """Seconds of a piece beyond its samples: ``before``, updated with a round's pieces; the last waited for a sum."""
    return piece_cost(sizes[:-1], seconds[:-1], before)
