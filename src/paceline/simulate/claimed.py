"""A round in pieces of samples that cost differently, on the virtual clock: who is free first claims next."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from paceline.costs import Array
from paceline.pieces.rule import Counts, against_the_first, piece_cost, portion
from paceline.rounds import PiecePlan, PieceTimes
from paceline.samples import CostModel, InPieces
from paceline.samples.cost import batch_parts, cost_of
from paceline.samples.pool import micro_cost
from paceline.simulate.pieces import AHEAD, CLAIM_SECONDS


class Claimed(NamedTuple):
    """What came of a round; n workers.

    loads: samples run, (n,). parts: what each worker's micro-batches add up to, (n, 3). seconds: until each was
    done, (n,). first: parts and seconds of what each ran before it claimed anything, NaN where nothing. times: what
    the pieces' seconds tell. pieces: cost of each worker's micro-batches as believed, in order.
    """

    loads: Counts
    parts: Array
    seconds: Array
    first: tuple[Array, Array]
    times: PieceTimes
    pieces: list[list[float]]


class _Worker:
    """One worker within the round. Amounts are costs as believed, without launches."""

    def __init__(
        self, slope: float, overhead: float, cost: float, believed: CostModel, truth: CostModel
    ) -> None:
        self._slope, self._cost, self._believed, self._truth = slope, cost, believed, truth
        self.overhead = self.free = overhead
        self.running = 0.0
        self.samples, self.parts = 0, np.zeros(3)
        self.amounts: list[float] = []
        self.times: list[float] = []

    def run(self, lengths: Array, sizes: list[int], asking: float = 0.0) -> None:
        """Micro-batches of these samples, after so long for their claim."""
        start = 0
        for size in sizes:
            parts = batch_parts(lengths[start : start + size], np.array([size]), self._truth.padded)
            self.running = asking + self._slope * float(cost_of(self._truth, parts))
            self.free += self.running
            self.times.append(self.running - asking)
            self.amounts.append(micro_cost(self._believed, parts))
            self.parts, self.samples = self.parts + parts, self.samples + size
            start, asking = start + size, 0.0

    @property
    def speed(self) -> float:
        """Cost a second in this round, as measured so far; 0 before that."""
        busy = sum(self.times) - self._cost * len(self.times)
        return sum(self.amounts) / busy if busy > 0 else 0.0


def play(
    dealt: InPieces,
    piece_plan: PiecePlan,
    truth: CostModel,
    slope: Array,
    overhead: Array,
    costs: Array,
    micro_batch: Counts,
    most: Counts,
    present: NDArray[np.bool_],
) -> Claimed:
    """Run a round; all arrays have shape (n,).

    slope: seconds of each worker for a cost of 1. overhead: before its first sample. costs: seconds of a piece beyond
    its samples, as measured so far, changed in place. micro_batch, most: samples of a micro-batch and of a round at
    most. present: who takes part.
    """
    own, pool, n = dealt.own, dealt.pool, len(slope)
    workers = [
        _Worker(float(slope[w]), float(overhead[w]), float(costs[w]), own.model, truth) for w in range(n)
    ]
    here = np.flatnonzero(present).tolist()
    first_parts, first_seconds = np.zeros((n, 3)), np.full(n, np.nan)
    for w in here:
        start, sizes = int(own.starts[w]), own.sizes[w].tolist()
        if dealt.kept[w]:
            sizes.pop()
        if sizes:
            workers[w].run(own.lengths[start:], sizes)
            first_parts[w], first_seconds[w] = workers[w].parts, workers[w].free
    place = 0
    asking = [w for w in here if most[w] - workers[w].samples > dealt.kept[w]]
    while place < len(pool.lengths):
        w = min(asking, key=lambda each: (workers[each].free - AHEAD * workers[each].running, each))
        mine = workers[w]
        speeds = [workers[each].speed or float(piece_plan.speeds[each]) for each in range(n)]
        known = float(piece_plan.speeds.sum()) > 0
        wanted = portion(
            piece_plan,
            w,
            told=all(workers[each].speed > 0 for each in here),
            left=pool.left(place),
            batch=dealt.whole,
            held=sum(mine.amounts) + float(dealt.kept_costs[w]),
            speed=speeds[w],
            together=sum(speeds[each] for each in here) if known else 0.0,
            workers=n,
        )
        room = int(most[w]) - mine.samples - int(dealt.kept[w])
        size = pool.samples(place, float(wanted), room)
        if not size:
            asking.remove(w)
            continue
        claim = max(CLAIM_SECONDS - AHEAD * mine.running, 0.0)
        mine.run(pool.lengths[place:], pool.cuts(place, size, int(micro_batch[w])), claim)
        place += size
    for w in here:
        if dealt.kept[w]:
            stop = int(own.starts[w + 1])
            workers[w].run(own.lengths[stop - int(dealt.kept[w]) :], [int(dealt.kept[w])])
        costs[w] = piece_cost(workers[w].amounts[:-1], workers[w].times[:-1], float(costs[w]))
    strays = [
        against_the_first(each.amounts, each.times, float(cost))
        for each, cost in zip(workers, costs, strict=True)
    ]
    return Claimed(
        np.array([each.samples for each in workers]),
        np.array([each.parts for each in workers]),
        np.array([workers[w].free if present[w] else np.nan for w in range(n)]),
        (first_parts, first_seconds),
        PieceTimes(costs.copy(), *np.array(strays, float).T),
        [each.amounts for each in workers],
    )
