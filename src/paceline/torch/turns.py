"""The turns of a training loop: a round's planned pieces, and between them those that this rank claims.

One iteration is an epoch of a loader, or some rounds whose samples the loop draws itself; a ``Source`` says what a
turn is given. Pace is told of each turn in the order that its methods for loaders name.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from typing import TYPE_CHECKING, Any, Protocol

from paceline.errors import PacelineError
from paceline.rounds import Indices
from paceline.torch.feed.batches import Piece, pieces
from paceline.torch.terms import Terms

if TYPE_CHECKING:
    from paceline.torch.pace import Pace


class Source(Protocol):
    """What the turns of one kind of loop are given."""

    @property
    def number(self) -> int | None:
        """Of the loader whose epochs are counted; None where a loop draws its own samples."""
        ...

    @property
    def samples(self) -> int | None:
        """That an epoch uses over all ranks; None where nobody knows."""
        ...

    def open(self) -> None:
        """An iteration begins."""
        ...

    def end(self) -> None:
        """The iteration is over, or was left."""
        ...

    def more(self) -> bool:
        """Whether another round follows."""
        ...

    def planned(self) -> tuple[Any, Piece]:
        """The next piece of the plan, and what its turn is given."""
        ...

    def claimed(self, start: int, size: int) -> Iterator[tuple[Any, int]]:
        """What the turns of a claim are given, and the samples of each."""
        ...


def turns(pace: Pace, source: Source) -> Generator[Any]:
    """One iteration over ``source``, turn by turn."""
    running = pace.open_epoch(source)
    try:
        while source.more():
            pace.before_piece()
            batch, piece = source.planned()
            while (claimed := pace.claim(piece)) is not None:
                left = claimed[1]
                for more, samples in source.claimed(*claimed):
                    left -= samples
                    then = None if left else piece.division
                    pace.begin_piece(piece._replace(samples=samples, last=False, division=then))
                    yield pace.place(more)
                    pace.end_piece(running)
            pace.begin_piece(piece)
            yield pace.place(batch)
            if source.number is None and piece.last and not source.more():
                pace.check_piece(running)
                return  # the loop steps the optimizer after its last turn
            pace.end_piece(running)
        pace.close_epoch()
    finally:
        source.end()
        pace.leave_epoch(running)


def round_in_pieces(
    terms: Terms, rank: int, step: int, loads: Indices, first: int, indices: Indices, fills: bool
) -> Iterator[tuple[Indices, Piece]]:
    """This rank's planned pieces of round ``step``, whose samples begin at ``first`` of ``indices``.

    fills: a turn with nothing to do gets samples that count for nothing."""
    division = terms.divide(step, loads, first)
    own = loads if division is None else division.first + division.kept
    start = first + int(own[:rank].sum())
    mine = indices[start : start + int(own[rank])]
    filler = indices[: terms.floor] if fills else None
    kept = 0 if division is None else int(division.kept[rank])
    return pieces(
        mine,
        step,
        loads,
        terms.micro_batch,
        filler,
        division,
        kept,
        terms.turns(loads),
        terms.floor,
        terms.quantum,
    )


class RoundBatch:
    """This rank's part of one round, for ``pace.round(batch, function)``, which runs it piece by piece.

    samples: of the round, over all ranks.
    """

    def __init__(self, pace: Pace, first: Any, turns: Iterator[Any], samples: int) -> None:
        self.samples = samples
        self._pace, self._first, self._turns = pace, first, turns
        self.ran = False

    def pieces(self) -> Iterator[Any]:
        """What each turn is given, drawn as it is run."""
        if self.ran:
            raise PacelineError(
                "pace.round() was called twice with one batch; expected once a turn of the loop"
            )
        self.ran = True
        yield self._first
        while not self._pace.last:
            yield next(self._turns)

    def __iter__(self) -> Iterator[Any]:
        raise PacelineError(
            "loop='round' yields a round that is not loaded yet; expected loss = pace.round(batch, function), whose "
            "function is called with the tensors of each piece, or Pace(..., loop='whole') for a loop that takes them"
        )

    __getitem__ = __len__ = to = __iter__


def by_round(pace: Pace, pieces: Generator[Any]) -> Iterator[RoundBatch]:
    """One item for each round, whose pieces are drawn as they are run."""
    try:
        for first in pieces:
            batch = RoundBatch(pace, first, pieces, pace.piece.batch)
            yield batch
            if not batch.ran:
                raise PacelineError(
                    f"round {pace.piece.step}: the loop went on without pace.round(batch, function); call it once "
                    "for each batch"
                )
    finally:
        pieces.close()
