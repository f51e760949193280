"""How a round is divided where work moves within it: what each rank runs at once, keeps for its end, and claims."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from paceline.errors import PacelineError
from paceline.pieces import rule
from paceline.pieces.rule import Counts
from paceline.rounds import PiecePlan


class Division(NamedTuple):
    """How one round begins; the same on every rank."""

    first: Counts  # samples that each rank runs at once, (n,)
    kept: Counts  # that it keeps for its end, (n,)
    start: int  # of the pool, among the epoch's samples
    pool: int  # samples to claim
    piece_plan: PiecePlan

    @property
    def batch(self) -> int:
        """Samples of the round."""
        return self.pool + int(self.first.sum() + self.kept.sum())


def divide(
    piece_plan: PiecePlan, loads: Counts, start: int, most: Counts, largest: Counts, unit: int, cell: int
) -> Division | None:
    """A round of these ``loads``, (n,), whose samples begin at ``start``; None where all of it is run as planned.

    most: samples that each rank may take in a round; largest: that fit into its memory at once; both (n,). unit:
    pieces are multiples of so many samples. cell: samples of every turn, 0 where turns differ.
    Raises PacelineError where the limits leave no room for whole cells.
    """
    if cell:
        first, kept = rule.divide_grid(piece_plan, loads, cell)
    else:
        first, kept = rule.divide(piece_plan, loads, unit, largest)
    own = first + kept
    room = np.maximum(np.minimum(most, loads.sum()) - own, 0) // unit * unit
    pool = int((loads - own).sum())
    if cell and room.sum() < pool:
        raise PacelineError(
            f"deterministic=True: the limits leave no room for whole cells of {cell} samples; widen them, "
            "or set a smaller quantum"
        )
    if not cell and (not pool or room.sum() < pool):  # some of it might find nobody
        return None
    return Division(first, kept, start + int(own.sum()), pool, piece_plan)
