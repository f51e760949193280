"""The plan of a round, which is the same on every rank; and a piece of it, which is one micro-step of one rank."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, Protocol

import numpy as np

from paceline.errors import PacelineError
from paceline.pieces import rule
from paceline.pieces.rule import Counts
from paceline.rounds import Array, Indices, PiecePlan
from paceline.samples import Deal, Pool
from paceline.samples.pool import micro_cost


class Division(NamedTuple):
    """The division of a round in which work moves: the samples that each rank runs at once, keeps, and may claim."""

    first: Counts  # samples that each rank runs at once, (n,)
    kept: Counts  # samples that each rank keeps for its end, (n,)
    start: int  # the pool's first sample in the epoch's order
    pool: int  # samples to claim
    piece_plan: PiecePlan
    costs: Pool | None = None  # costs of the samples to claim, if they cost differently
    reserved: Array | None = None  # with ``costs``: cost of what each rank keeps for its end, (n,)
    whole: float = 0.0  # with ``costs``: the cost of the round

    @property
    def batch(self) -> int:
        """Samples of the round."""
        return self.pool + int(self.first.sum() + self.kept.sum())


class RoundPlan(NamedTuple):
    """The plan of one round."""

    step: int  # counted over the whole run
    loads: Indices  # every rank's samples, shape (n,)
    batch: int  # samples of all ranks
    division: Division | None = None  # None if no work moves
    # The ranks' samples and micro-batches, if they are divided by cost; the samples to claim come after these.
    deal: Deal | None = None
    first: int = 0  # with ``deal``: its first sample in the epoch's order

    @property
    def at_once(self) -> float:
        """The portion of the plan that runs before the first claim."""
        return 1.0 if self.division is None else float(self.division.piece_plan.at_once)

    @property
    def uneven(self) -> bool:
        """Whether the ranks' loads differ."""
        return bool((self.loads != self.loads[0]).any())


class Piece(NamedTuple):
    """A micro-batch of this rank, which one micro-step runs."""

    plan: RoundPlan  # the plan of its round
    samples: int  # samples that count; fewer than the indices if some are there only for batch norm
    first: bool  # it is the first of its round on this rank
    last: bool
    claims: bool = False  # work may be claimed after this piece; before it, if it is the last
    parts: Array | None = None  # sums over its samples, see ``Deal.parts``, (3,), if they cost differently
    start: int = -1  # its first sample in the epoch's order, or among those that its rank drew by itself

    @property
    def amount(self) -> float:
        """The piece's amount of work, the unit of claims: samples, or their cost without a launch."""
        if self.parts is None or self.plan.deal is None:
            return self.samples
        return micro_cost(self.plan.deal.model, self.parts)

    @property
    def lengths(self) -> Array | None:
        """The lengths of its samples, (samples,); None if all samples cost the same."""
        if self.parts is None or self.plan.deal is None:
            return None
        at = self.start - self.plan.first
        return self.plan.deal.lengths[at : at + self.samples]

    @property
    def step(self) -> int:
        """The number of its round, counted over the whole run."""
        return self.plan.step

    @property
    def batch(self) -> int:
        """Samples of the round over all ranks."""
        return self.plan.batch

    @property
    def division(self) -> Division | None:
        """The division to claim from after this piece, or before it if it is the last; None without claims."""
        return self.plan.division if self.claims else None


class Claim(NamedTuple):
    """The samples that a rank has claimed."""

    start: int  # the first sample in the epoch's order
    sizes: tuple[int, ...]  # samples of each micro-step that runs a part of the claim
    parts: tuple[Array | None, ...]  # ``Piece.parts`` of each micro-step


class Source(Protocol):
    """The batches for the micro-steps of one kind of loop."""

    @property
    def number(self) -> int | None:
        """Number of the loader whose epochs are counted; None if a loop draws its own samples."""
        ...

    @property
    def samples(self) -> int | None:
        """Samples of an epoch over all ranks; None if unknown."""
        ...

    @property
    def order(self) -> tuple[int, bool] | tuple[None, None]:
        """The seed of the epochs' orders, and whether they are shuffled; None for both if it is not decided here."""
        ...

    def open(self) -> None:
        """An iteration begins."""
        ...

    def end(self) -> None:
        """The iteration is over, or was left."""
        ...

    @property
    def more(self) -> Callable[[], bool] | None:
        """Called between two rounds: whether another follows. None if ``samples`` are known."""
        ...

    def planned(self) -> tuple[Any, Piece]:
        """The batch of the next planned micro-step, and its piece of the round."""
        ...

    @property
    def claimed(self) -> Callable[[Claim], Iterator[Any]] | None:
        """Gives the batches of a claim's micro-steps. None if rounds are run as planned."""
        ...


def claimed(division: Division, start: int, size: int, chunk: int, micro_batch: int) -> Claim:
    """The claim of ``size`` samples from ``start`` of the pool on, cut into micro-steps.

    chunk: samples of every micro-step, 0 if micro-steps differ. micro_batch: samples that fit into the rank's
        memory at once.
    """
    at, costs = division.start + start, division.costs
    if costs is None:
        each = chunk or size
        sizes = tuple(min(each, size - place) for place in range(0, size, each))
        return Claim(at, sizes, (None,) * len(sizes))
    cuts = costs.cuts(start, size, chunk or micro_batch)
    places = np.concatenate(([0], np.cumsum(cuts)[:-1])) + start
    parts = tuple(costs.parts(place, cut) for place, cut in zip(places.tolist(), cuts, strict=True))
    return Claim(at, tuple(cuts), parts)


def divide(
    piece_plan: PiecePlan, loads: Counts, start: int, most: Counts, largest: Counts, unit: int, chunk: int
) -> Division | None:
    """The division of a round of these ``loads``, (n,), whose samples begin at ``start``; None if no work moves.

    most: samples that each rank may take in a round; largest: samples that fit into its memory at once; both (n,).
    unit: pieces are multiples of this many samples. chunk: samples of every micro-step, 0 if micro-steps differ.
    Raises PacelineError if the limits leave no room for whole chunks.
    """
    if not chunk and piece_plan.at_once >= 1:
        return None
    if chunk:
        first, kept = rule.divide_chunks(piece_plan, loads, chunk)
    else:
        first, kept = rule.divide(piece_plan, loads, unit, largest)
    own = first + kept
    whole = -(-loads.sum() // unit) * unit  # the last piece of a short round may be smaller than the others
    room = np.maximum(np.minimum(most, whole) - own, 0) // unit * unit
    pool = int((loads - own).sum())
    if chunk and room.sum() < pool:
        raise PacelineError(
            f"deterministic=True: the limits leave no room for whole chunks of {chunk} samples; widen them, "
            "or set a smaller quantum"
        )
    if not chunk and (not pool or room.sum() < pool):  # with too little room, samples would be left over
        return None
    return Division(first, kept, start + int(own.sum()), pool, piece_plan)
