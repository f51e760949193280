"""Loops that do not take one batch for each micro-step: a round at a time, for ``pace.round(batch, function)``, which
runs its pieces; and rounds whose samples the loop draws itself, so that Paceline only gives their number."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from typing import Any

import numpy as np
import torch

from paceline.errors import PacelineError, refuse, whole
from paceline.rounds import Indices
from paceline.torch.feed.pieces import planned_pieces
from paceline.torch.gradients.counts import checked_count
from paceline.torch.loop import Loop
from paceline.torch.plan import Claim, Piece, Source


class RoundBatch:
    """This rank's part of one round, for ``pace.round(batch, function)``, which runs it piece by piece."""

    def __init__(self, loop: Loop, first: Any, pieces: Iterator[Any]) -> None:
        self._loop, self._first, self._pieces = loop, first, pieces
        self.ran = False

    def pieces(self) -> Iterator[Any]:
        """The batches of the micro-steps, each drawn when it is run."""
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
            "loop='round' yields a round that is not loaded yet; expected loss = pace.round(batch, function), or "
            "Pace(..., loop='whole') for a loop that takes the tensors"
        )

    __getitem__ = __len__ = to = __iter__


def run_round(
    loop: Loop,
    backward: Callable[..., None],
    batch: Any,
    function: Callable[..., Any],
    reduction: str,
    scaler: Any,
) -> torch.Tensor:
    """Run ``function`` and ``backward`` for each piece of a round, see ``Pace.round``."""
    pieces = batch.pieces() if isinstance(batch, RoundBatch) else iter([batch])
    total: torch.Tensor | None = None
    last: torch.Tensor | None = None
    count = 0.0

    def one(part: Any) -> tuple[torch.Tensor, float, bool]:
        """Run the forward and backward pass of a part; returns its loss, the count that it is a mean over, and
        whether it counts."""
        samples = loop.round.running.samples
        returned = function(*part) if isinstance(part, list | tuple) else function(part)
        loss, own = returned if isinstance(returned, tuple) else (returned, None)
        own = None if own is None else checked_count(own)
        backward(loss, reduction, scaler, own)
        many = samples if own is None else own * (samples > 0)
        return loss.detach(), many, samples > 0 if reduction == "sum" else many > 0

    memory = loop.memory
    for part in pieces:
        for last, many, counts in [one(part)] if memory is None else memory.run(part, one):
            if counts:
                counted = last * many if reduction == "mean" else last
                total = counted if total is None else total + counted
                count += many
    assert last is not None
    if total is None:
        return last
    return total / count if reduction == "mean" else total


def check_unchanging(loop: Loop, what: str) -> None:
    """Refuses ``what`` by a PacelineError if ranks drop late pieces, or must find equal bits."""
    reasons = {
        "drop= leaves out none of these samples; use pace.loader(dataset)": loop.drops,
        "deterministic=True fixes which rank runs which sample; use pace.loader(dataset)": loop.terms.chunk,
    }
    refuse(what, reasons)


def iterate(loop: Loop, source: Source) -> Iterator[Any]:
    """One iteration over ``source``: the batch of each micro-step, or a ``RoundBatch`` for each round."""
    each = loop.over(source)
    return _by_round(loop, each) if loop.terms.loop == "round" else each


def _by_round(loop: Loop, pieces: Generator[Any]) -> Iterator[RoundBatch]:
    """One batch for each round, whose pieces are drawn when they are run."""
    try:
        for first in pieces:
            batch = RoundBatch(loop, first, pieces)
            yield batch
            if not batch.ran:
                raise PacelineError(
                    f"round {loop.round.running.step}: the loop went on without pace.round(batch, function); "
                    "call it once for each batch"
                )
    finally:
        pieces.close()


class Sizes:
    """The numbers of samples of this rank's micro-steps, for ``rounds`` rounds, or without end if that is None."""

    number: int | None = None
    samples: int | None = None
    order = (None, None)

    def __init__(self, loop: Loop, rounds: int | None) -> None:
        terms = loop.terms
        if rounds is not None:
            whole("rounds", rounds)
        check_unchanging(loop, "pace.sizes()")
        if terms.moves_work and terms.weigh == "hook":
            raise PacelineError(
                f"policy {terms.policy} moves work within the round, and with weigh='hook' a loop that draws its own "
                "samples cannot have a micro-step that counts for nothing; use weigh='loss', or policy='level'"
            )
        self._loop, self._left = loop, rounds
        loop.drawn_ahead()
        self._all = np.arange(0)
        self._planned: Iterator[tuple[Indices, Piece]] = iter(())

    def open(self) -> None:
        """Nothing to do: an iteration keeps no state."""

    end = open

    def more(self) -> bool:
        return self._left is None or self._left > 0

    def planned(self) -> tuple[int, Piece]:
        loop, terms = self._loop, self._loop.terms
        if not loop.in_round:
            step = loop.progress.rounds
            size = loop.progress.size(step)
            if len(self._all) != size:
                self._all = np.arange(size)
            plan = terms.divided(step, size, 0)
            self._planned = iter(planned_pieces(terms, loop.rank, plan, 0, self._all, True))
        chosen, piece = next(self._planned)
        if piece.last and self._left is not None:
            self._left -= 1
        return len(chosen), piece

    def claimed(self, claim: Claim) -> Iterator[int]:
        yield from claim.sizes
