"""Rounds whose samples the training loop draws itself: Paceline only says how many."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from paceline.rounds import Indices
from paceline.torch.feed.pieces import planned_pieces
from paceline.torch.plan import Piece
from paceline.torch.turns import Turns


class Sizes:
    """The numbers of samples of this rank's turns, for ``rounds`` rounds, or for ever where that is None."""

    number: int | None = None
    samples: int | None = None

    def __init__(self, turns: Turns, rounds: int | None) -> None:
        self._turns, self._left = turns, rounds
        self._all = np.arange(turns.terms.global_batch)
        self._planned: Iterator[tuple[Indices, Piece]] = iter(())

    def open(self) -> None:
        """Each iteration has rounds of its own."""

    def end(self) -> None:
        """Nothing is kept."""

    def more(self) -> bool:
        return self._left is None or self._left > 0

    def planned(self) -> tuple[int, Piece]:
        turns, terms = self._turns, self._turns.terms
        if not turns.in_round:
            step = turns.progress.rounds
            plan = terms.divided(step, terms.balancer.loads(step, terms.global_batch), 0)
            self._planned = planned_pieces(terms, turns.rank, plan, 0, self._all, True)
        chosen, piece = next(self._planned)
        if piece.last and self._left is not None:
            self._left -= 1
        return len(chosen), piece

    def claimed(self, start: int, size: int) -> Iterator[tuple[int, int]]:
        yield size, size
