"""Loops that take a round at a time: ``pace.round(batch, function)`` runs the pieces of each."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from typing import Any

from paceline.errors import PacelineError
from paceline.torch.turns import Source, Turns


class RoundBatch:
    """This rank's part of one round, for ``pace.round(batch, function)``, which runs it piece by piece.

    samples: of the round, over all ranks.
    """

    def __init__(self, turns: Turns, first: Any, pieces: Iterator[Any], samples: int) -> None:
        self.samples = samples
        self._turns, self._first, self._pieces = turns, first, pieces
        self.ran = False

    def pieces(self) -> Iterator[Any]:
        """What each turn is given, drawn as it is run."""
        if self.ran:
            raise PacelineError(
                "pace.round() was called twice with one batch; expected once a turn of the loop"
            )
        self.ran = True
        yield self._first
        while not self._turns.last:
            yield next(self._pieces)

    def __iter__(self) -> Iterator[Any]:
        raise PacelineError(
            "loop='round' yields a round that is not loaded yet; expected loss = pace.round(batch, function), whose "
            "function is called with the tensors of each piece, or Pace(..., loop='whole') for a loop that takes them"
        )

    __getitem__ = __len__ = to = __iter__


def iterate(turns: Turns, source: Source) -> Iterator[Any]:
    """One iteration over ``source``: what each turn is given, or a ``RoundBatch`` for each round."""
    each = turns.over(source)
    return _by_round(turns, each) if turns.terms.loop == "round" else each


def _by_round(turns: Turns, pieces: Generator[Any]) -> Iterator[RoundBatch]:
    """One item for each round, whose pieces are drawn as they are run."""
    try:
        for first in pieces:
            batch = RoundBatch(turns, first, pieces, turns.passes.piece.batch)
            yield batch
            if not batch.ran:
                raise PacelineError(
                    f"round {turns.passes.piece.step}: the loop went on without pace.round(batch, function); "
                    "call it once for each batch"
                )
    finally:
        pieces.close()
