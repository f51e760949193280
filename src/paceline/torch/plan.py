"""What one round is, as planned, the same on every rank; and a piece of it, which is one micro-step of one rank."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple, Protocol

import numpy as np

from paceline.errors import PacelineError
from paceline.pieces import rule
from paceline.pieces.rule import Counts
from paceline.rounds import Array, Indices, PiecePlan
from paceline.samples import Deal, Pool
from paceline.samples.pool import micro_cost


class Division(NamedTuple):
    """How a round begins in which work moves: what each rank runs at once, keeps for its end, and claims."""

    first: Counts  # samples that each rank runs at once, (n,)
    kept: Counts  # that it keeps for its end, (n,)
    start: int  # of the pool, among the epoch's samples
    pool: int  # samples to claim
    piece_plan: PiecePlan
    costs: Pool | None = None  # of the samples to claim, if they cost differently
    reserved: Array | None = None  # cost of what each rank keeps for its end, (n,), there
    whole: float = 0.0  # cost of the round, there

    @property
    def batch(self) -> int:
        """Samples of the round."""
        return self.pool + int(self.first.sum() + self.kept.sum())


class RoundPlan(NamedTuple):
    """One round, before any of it is run."""

    step: int  # counted over the whole run
    loads: Indices  # every rank's samples, shape (n,)
    batch: int  # samples of all ranks
    division: Division | None = None  # None if all of it is run as planned
    # Who runs which samples in which micro-batches, if they are divided by cost; what is claimed follows these.
    deal: Deal | None = None

    @property
    def at_once(self) -> float:
        """Portion of the plan that is run before anything is claimed."""
        return 1.0 if self.division is None else float(self.division.piece_plan.at_once)


class Piece(NamedTuple):
    """A micro-batch of this rank: what one micro-step computes."""

    plan: RoundPlan  # of the round it belongs to
    samples: int  # samples that count; fewer than the indices where some only keep batch norm fed
    first: bool  # in its round
    last: bool
    claims: bool = False  # work may be claimed after this piece; before it, if it is the last
    parts: Array | None = None  # what it adds up to, see ``Deal.parts``, (3,), if samples cost differently
    start: int = -1  # its first sample in the epoch's order, or among those that its rank drew by itself

    @property
    def amount(self) -> float:
        """How much is to run, as pieces are claimed: samples, or their cost without a launch."""
        if self.parts is None or self.plan.deal is None:
            return self.samples
        return micro_cost(self.plan.deal.model, self.parts)

    @property
    def step(self) -> int:
        """The round it belongs to, counted over the whole run."""
        return self.plan.step

    @property
    def batch(self) -> int:
        """Samples of the round over all ranks."""
        return self.plan.batch

    @property
    def division(self) -> Division | None:
        """What to claim from after this piece; before it, if it is the last. None if nothing is claimed."""
        return self.plan.division if self.claims else None


class Claim(NamedTuple):
    """What a rank has claimed."""

    start: int  # among the epoch's samples
    sizes: tuple[int, ...]  # samples of each micro-step that runs a part of it
    parts: tuple[Array | None, ...]  # of each micro-step, see ``Piece.parts``


class Source(Protocol):
    """What the micro-steps of one kind of loop are given."""

    @property
    def number(self) -> int | None:
        """Number of the loader whose epochs are counted; None if a loop draws its own samples."""
        ...

    @property
    def samples(self) -> int | None:
        """Samples of an epoch over all ranks; None if nobody knows."""
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
        """What the next planned micro-step is given, and the piece of a round that it is."""
        ...

    def claimed(self, claim: Claim) -> Iterator[Any]:
        """What the micro-steps of a claim are given."""
        ...


def claimed(division: Division, start: int, size: int, cell: int, micro_batch: int) -> Claim:
    """So many samples from ``start`` of the pool on, cut into micro-steps.

    cell: samples of every micro-step, 0 if micro-steps differ. micro_batch: samples that fit into the rank's
        memory at once.
    """
    at, costs = division.start + start, division.costs
    if costs is None:
        each = cell or size
        sizes = tuple(min(each, size - place) for place in range(0, size, each))
        return Claim(at, sizes, (None,) * len(sizes))
    cuts = costs.cuts(start, size, cell or micro_batch)
    places = np.concatenate(([0], np.cumsum(cuts)[:-1])) + start
    parts = tuple(costs.parts(place, cut) for place, cut in zip(places.tolist(), cuts, strict=True))
    return Claim(at, tuple(cuts), parts)


def divide(
    piece_plan: PiecePlan, loads: Counts, start: int, most: Counts, largest: Counts, unit: int, cell: int
) -> Division | None:
    """A round of these ``loads``, (n,), whose samples begin at ``start``; None if all of it is run as planned.

    most: samples that each rank may take in a round; largest: that fit into its memory at once; both (n,). unit:
    pieces are multiples of so many samples. cell: samples of every micro-step, 0 if micro-steps differ.
    Raises PacelineError if the limits leave no room for whole cells.
    """
    if not cell and piece_plan.at_once >= 1:
        return None
    if cell:
        first, kept = rule.divide_grid(piece_plan, loads, cell)
    else:
        first, kept = rule.divide(piece_plan, loads, unit, largest)
    own = first + kept
    whole = -(-loads.sum() // unit) * unit  # the last piece of a short round may be smaller than the others
    room = np.maximum(np.minimum(most, whole) - own, 0) // unit * unit
    pool = int((loads - own).sum())
    if cell and room.sum() < pool:
        raise PacelineError(
            f"deterministic=True: the limits leave no room for whole cells of {cell} samples; widen them, "
            "or set a smaller quantum"
        )
    if not cell and (not pool or room.sum() < pool):  # some of it might find nobody
        return None
    return Division(first, kept, start + int(own.sum()), pool, piece_plan)
