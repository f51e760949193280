"""Loops of other shapes than a batch a micro-step: a round at a time, for ``pace.round(batch, function)``, which
runs its pieces; and rounds whose samples the loop draws itself, so that Paceline only says how many."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from typing import Any

import numpy as np

from paceline.errors import PacelineError
from paceline.rounds import Indices
from paceline.torch.feed.pieces import planned_pieces
from paceline.torch.loop import Loop
from paceline.torch.plan import Claim, Piece, Source


class RoundBatch:
    """This rank's part of one round, for ``pace.round(batch, function)``, which runs it piece by piece.

    samples: of the round, over all ranks.
    """

    def __init__(self, loop: Loop, first: Any, pieces: Iterator[Any], samples: int) -> None:
        self.samples = samples
        self._loop, self._first, self._pieces = loop, first, pieces
        self.ran = False

    def pieces(self) -> Iterator[Any]:
        """What each micro-step is given, drawn as it is run."""
        if self.ran:
            raise PacelineError(
                "pace.round() was called twice with one batch; expected once an iteration of the loop"
            )
        self.ran = True
        yield self._first
        while not self._loop.last:
            yield next(self._pieces)

    def __iter__(self) -> Iterator[Any]:
        raise PacelineError(
            "loop='round' yields a round that is not loaded yet; expected loss = pace.round(batch, function), whose "
            "function is called with the tensors of each piece, or Pace(..., loop='whole') for a loop that takes them"
        )

    __getitem__ = __len__ = to = __iter__


def iterate(loop: Loop, source: Source) -> Iterator[Any]:
    """One iteration over ``source``: what each micro-step is given, or a ``RoundBatch`` for each round."""
    each = loop.over(source)
    return _by_round(loop, each) if loop.terms.loop == "round" else each


def _by_round(loop: Loop, pieces: Generator[Any]) -> Iterator[RoundBatch]:
    """One item for each round, whose pieces are drawn as they are run."""
    try:
        for first in pieces:
            batch = RoundBatch(loop, first, pieces, loop.passes.piece.batch)
            yield batch
            if not batch.ran:
                raise PacelineError(
                    f"round {loop.passes.piece.step}: the loop went on without pace.round(batch, function); "
                    "call it once for each batch"
                )
    finally:
        pieces.close()


class Sizes:
    """The numbers of samples of this rank's micro-steps, for ``rounds`` rounds, or for ever where that is None."""

    number: int | None = None
    samples: int | None = None

    def __init__(self, loop: Loop, rounds: int | None) -> None:
        self._loop, self._left = loop, rounds
        self._all = np.arange(loop.terms.global_batch)
        self._planned: Iterator[tuple[Indices, Piece]] = iter(())

    def open(self) -> None:
        """Each iteration has rounds of its own."""

    def end(self) -> None:
        """Nothing is kept."""

    def more(self) -> bool:
        return self._left is None or self._left > 0

    def planned(self) -> tuple[int, Piece]:
        loop, terms = self._loop, self._loop.terms
        if not loop.in_round:
            step = loop.progress.rounds
            plan = terms.divided(step, terms.balancer.loads(step, terms.global_batch), 0)
            self._planned = planned_pieces(terms, loop.rank, plan, 0, self._all, True)
        chosen, piece = next(self._planned)
        if piece.last and self._left is not None:
            self._left -= 1
        return len(chosen), piece

    def claimed(self, claim: Claim) -> Iterator[int]:
        yield from claim.sizes
