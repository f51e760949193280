"""Rounds whose samples the training loop draws itself: Paceline only says how many."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from paceline.rounds import Indices
from paceline.torch.feed.batches import Piece
from paceline.torch.turns import round_in_pieces

if TYPE_CHECKING:
    from paceline.torch.pace import Pace


class Sizes:
    """The numbers of samples of this rank's turns, for ``rounds`` rounds, or for ever where that is None."""

    number: int | None = None
    samples: int | None = None

    def __init__(self, pace: Pace, rounds: int | None) -> None:
        self._pace, self._left = pace, rounds
        self._all = np.arange(pace.global_batch)
        self._planned: Iterator[tuple[Indices, Piece]] = iter(())

    def open(self) -> None:
        """Each iteration has rounds of its own."""

    def end(self) -> None:
        """Nothing is kept."""

    def more(self) -> bool:
        return self._left is None or self._left > 0

    def planned(self) -> tuple[int, Piece]:
        if not self._pace.in_round:
            pace, step = self._pace, self._pace.rounds
            loads = pace.loads(step, pace.global_batch)
            self._planned = round_in_pieces(pace.terms, pace.rank, step, loads, 0, self._all, True)
        chosen, piece = next(self._planned)
        if piece.last and self._left is not None:
            self._left -= 1
        return len(chosen), piece

    def claimed(self, start: int, size: int) -> Iterator[tuple[int, int]]:
        yield size, size
