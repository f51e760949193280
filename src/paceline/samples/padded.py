"""Padded samples dealt to uneven workers: runs of samples of similar length, cut so that all workers end together.

A padded micro-batch costs its size times its longest sample, and a launch. So samples are sorted by length, the
longest first; each worker gets a run of them, and cuts it into micro-batches: many have little padding but cost many
launches. For a given time each worker takes the longest run that it can end by then with the best cuts (a shortest
path over the places to cut, in one pass: the costs have the Monge property, so a later beginning, once it is
better, stays so). The time is found by bisection.
"""

from __future__ import annotations

import sys
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from paceline.costs import Array
from paceline.errors import PacelineError

__all__ = ["Limits", "best_cuts", "sorted_runs"]

Counts = NDArray[np.int64]
PLACES = 2048  # places at which a cut may be, if there are at least as many samples
CLOSE = 1e-3  # relative accuracy of the round's time


class Limits(NamedTuple):
    """Limits of each worker and of a micro-batch.

    Attributes:
        least: Samples of a round at least, shape (n,).
        most: Samples of a round at most, shape (n,).
        micro_batch: Samples of a micro-batch at most, (n,).
        budget: Its size times its longest sample's length at most.
        one: Each worker's whole run is one micro-batch.
    """

    least: Counts
    most: Counts
    micro_batch: Counts
    budget: float = np.inf
    one: bool = False


def sorted_runs(
    costs: Array, lengths: Array, launch: float, pace: Array, overhead: Array, limits: Limits
) -> tuple[Counts, list[Counts]]:
    """The runs that end soonest, with the quickest workers first or last.

    Args:
        costs: Of the samples, the longest first, (B,).
        lengths: Of the samples, the longest first, (B,).
        launch: Cost of a micro-batch beyond its samples.
        pace: Seconds of each worker for a cost of 1, shape (n,); infinite for a worker that gets nothing.
        overhead: Seconds before a worker's first sample, shape (n,).
        limits: Of the workers and of a micro-batch.

    Returns:
        The order of the workers' runs, shape (n,), and the sizes of each worker's micro-batches.

    Raises:
        PacelineError: If the limits of a micro-batch cannot hold the samples.
    """
    quickest = np.argsort(pace, kind="stable")
    orders = [quickest] if pace.min() == pace.max() else [quickest, quickest[::-1]]
    cutting, workers = _Cutting(costs, lengths, launch, limits), quickest
    seconds, sizes = cutting.best(pace, overhead, workers)
    for order in orders[1:]:
        sooner, others = cutting.best(pace, overhead, order, seconds)
        if sooner < seconds:
            workers, sizes = order, others
    if left := len(costs) - sum(int(each.sum()) for each in sizes):
        raise PacelineError(
            f"the limits of a micro-batch leave {left} of the round's {len(costs)} samples without a place; raise "
            "them, or allow more micro-steps"
        )
    return workers, sizes


def best_cuts(costs: Array, lengths: Array, launch: float, micro_batch: int, budget: float) -> list[int]:
    """Cut samples into the micro-batches that cost least.

    Args:
        costs: Of the samples, the longest first, shape (B,).
        lengths: Of the samples, the longest first, shape (B,).
        launch: Cost of a micro-batch beyond its samples.
        micro_batch: Samples of a micro-batch at most.
        budget: Its size times its longest sample's length, at most.

    Returns:
        Sizes of the micro-batches, in the samples' order.
    """
    alone, many = np.zeros(1, np.int64), len(costs)
    limits = Limits(alone, alone + many, alone + micro_batch, budget)
    return _Cutting(costs, lengths, launch, limits).cuts(0, np.inf, many, micro_batch)


class _Cutting:
    """The sorted samples, and the places at which runs of them may be cut."""

    def __init__(self, costs: Array, lengths: Array, launch: float, limits: Limits) -> None:
        self.batch = len(costs)
        self.costs: list[float] = costs.tolist()
        self.launch, self.limits = launch, limits
        with np.errstate(over="ignore"):
            fit = np.minimum(np.floor(limits.budget / lengths), self.batch)
        self.budgeted: list[int] = fit.astype(np.int64).tolist()
        step = max(1, min(self.batch // PLACES, int(limits.micro_batch.min()), min(self.budgeted)))
        self.places = list(range(step, self.batch, step))
        self.step = step

    def best(
        self, pace: Array, overhead: Array, workers: Counts, beat: float = np.inf
    ) -> tuple[float, list[Counts]]:
        """The time at which the last worker ends, infinite if not before ``beat``, and each one's micro-batches.

        workers: in the order of their runs."""
        limits, pace, overhead = self.limits, pace[workers], overhead[workers]
        least = np.minimum(limits.least[workers], self.batch)
        later = least[::-1].cumsum()[::-1] - least  # samples that the workers after each must have
        given = pace, overhead, least, limits.most[workers], limits.micro_batch[workers], later
        self.turns = list(zip(*(each.tolist() for each in given), strict=True))  # in that order
        speeds = np.where(np.isfinite(pace), 1.0 / pace, 0.0)
        together = float(speeds.sum())
        before = self._before()
        low = (before[-1] + float((overhead * speeds).sum())) / together
        high, runs, stride = np.inf, None, 1.0
        level = float(low if beat == np.inf else beat * (1 - CLOSE))
        while runs is None or high - low > CLOSE * high:
            cuts = self._sweep(level)
            done = sum(map(sum, cuts))
            if done == self.batch:
                high, runs = level, cuts
            else:
                low = level
            if runs is not None:
                level = 0.5 * (low + high)
            elif beat < np.inf or level == sys.float_info.max:
                runs = self._sweep(sys.float_info.max)
                break
            else:  # the samples that are left take at least this much longer
                level += stride * max((before[-1] - before[done]) / together, CLOSE * level)
                level, stride = min(level, sys.float_info.max), 1.5 * stride
        return high, [np.array(runs[place], np.int64) for place in np.argsort(workers).tolist()]

    def _before(self) -> list[float]:
        """The least cost of the samples before each place: padded as in the best cuts of all samples."""
        if self.limits.one:
            return np.concatenate(([0.0], np.cumsum(self.costs))).tolist()
        sizes = np.array(self.cuts(0, np.inf, self.batch, int(self.limits.micro_batch.max())), np.int64)
        starts = np.cumsum(sizes) - sizes
        costs = np.repeat(np.array(self.costs)[starts], sizes)
        costs[starts] += self.launch
        total = np.zeros(self.batch + 1)
        total[1 : len(costs) + 1] = np.cumsum(costs)
        return total.tolist()

    def _sweep(self, level: float) -> list[list[int]]:
        """Each worker's micro-batches, in the order of the workers, if no worker may end after ``level``."""
        start, cuts = 0, []
        for pace, overhead, least, most, cap, later in self.turns:
            may, mine = min(most, self.batch - start - later), list[int]()
            if may > 0 and pace < np.inf:
                mine = self.cuts(start, (level - overhead) / pace, may, cap)
                if sum(mine) < least:
                    mine = self.cuts(start, np.inf, least, cap)
            cuts.append(mine)
            start += sum(mine)
        return cuts

    def cuts(self, start: int, budget: float, most: int, cap: int) -> list[int]:
        """Sizes of the micro-batches of the longest run from ``start`` that costs at most ``budget``."""
        stop = start + most
        if start >= self.batch or most <= 0:
            return []
        if self.limits.one:
            first = self.costs[start]
            size = min(most, cap, self.budgeted[start])
            return [took] if (took := int(min(size, budget / first))) > 0 else []
        costs, launch, budgeted = self.costs, self.launch, self.budgeted
        # Beginnings of the last micro-batch, as a queue: (beginning, cost up to it, first end for which it is best).
        begins, spent, since = [start], [0.0], [float(start)]
        front = 0
        parents: dict[int, int] = {}
        reached, beginning, cheapest = start, start, np.inf
        places = self.places
        place = start // self.step  # index of the first place beyond ``start``
        at, cost = start, 0.0
        while True:
            # The last micro-batch from here, as far as the budget allows.
            first = costs[at]
            rest = budget - cost - launch
            if rest >= first:
                size = min(cap, budgeted[at], stop - at)
                if rest < size * first:
                    size = int(rest / first)
                total = cost + launch + size * first
                if at + size > reached or (at + size == reached and total < cheapest):
                    reached, beginning, cheapest = at + size, at, total
            if place >= len(places) or places[place] >= stop:
                break
            at = places[place]
            place += 1
            while front + 1 < len(begins) and since[front + 1] <= at:
                front += 1
            begin = begins[front]
            cost = spent[front] + launch + (at - begin) * costs[begin]
            if cost > budget:
                break
            parents[at] = begin
            # The new beginning replaces the last one once it is cheaper, or once that one reaches its limits.
            value = cost - at * costs[at]
            while True:
                last = begins[-1]
                drop = costs[last] - costs[at]
                expires = last + min(cap, budgeted[last])
                gain = value - (spent[-1] - last * costs[last])
                takes = gain / drop if drop > 0 else (np.inf if gain > 0 else float(at))
                takes = min(max(takes, float(at)), expires + 0.5)
                if takes <= since[-1] and len(begins) - 1 > front:
                    begins.pop(), spent.pop(), since.pop()
                else:
                    break
            begins.append(at)
            spent.append(cost)
            since.append(takes)
        if reached == start:
            return []
        ends = [reached]
        while beginning > start:
            ends.append(beginning)
            beginning = parents[beginning]
        ends.append(start)
        return [end - begin for begin, end in zip(ends[:0:-1], ends[-2::-1], strict=True)]
