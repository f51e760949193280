"""Samples dealt to uneven workers, the longest first: each goes to the worker that then ends soonest.

This is the LPT rule for uniform machines (Q||Cmax). If no worker has an overhead and no limit binds, it ends within
2n / (n + 1) times the best possible time for n workers (Gonzalez, Ibarra and Sahni, "Bounds for LPT schedules on
uniform processors", SIAM Journal on Computing 6, 1977). With many more samples than workers, it ends later than the
best possible time by only a fraction of the shortest sample.

One interpreter step for each sample takes long. So only the last of many samples are dealt one by one; those before
are dealt in blocks of nearly equal samples, of which each worker gets as many as the rule gives it of equal ones. The
shorter samples after a block even out the differences that it leaves.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from paceline.costs import Array, Linear
from paceline.errors import PacelineError
from paceline.shares import whole_samples

__all__ = ["bound", "longest_first", "lower_bound"]

Counts = NDArray[np.int64]
FEW = 2048  # up to this many samples, all are dealt one by one
TAIL = 4  # with more, the last samples are dealt one by one, this many for each worker
ALIKE = 0.75  # the shortest sample of a block has at least this part of the longest's cost
MOST_OF_REST = 0.5  # a block has at most this part of the remaining samples


def longest_first(
    costs: Array,
    pace: Array,
    overhead: Array | None = None,
    least: Counts | None = None,
    most: Counts | None = None,
) -> Counts:
    """Give one sample after another, the longest first, to the worker that then ends soonest.

    Equal samples are dealt in their order, and ties go to the lowest worker.

    Args:
        costs: Of the samples, positive, shape (B,).
        pace: Seconds of each worker for a cost of 1, shape (n,), positive; infinite for a worker that gets nothing.
        overhead: Seconds before a worker's first sample, shape (n,); default 0.
        least: Samples of each worker at least, shape (n,).
        most: Samples of each worker at most, shape (n,).

    Returns:
        The worker of each sample, int64 of shape (B,).

    Raises:
        PacelineError: If the limits cannot hold the samples.
    """
    batch, workers = len(costs), len(pace)
    least, most = limited(batch, pace, least, most)
    order = np.argsort(-costs, kind="stable")
    sizes = costs[order]
    begin = np.zeros(workers) if overhead is None else overhead
    tail = batch if batch <= FEW else max(TAIL * workers, int(least.sum()))
    chosen = _placed(sizes, pace, begin, least, most, tail)
    if tail < batch and not begin.any() and most.min() == batch:
        ends = (np.bincount(chosen, sizes, workers) * pace).max()
        # Blocks broke the rule's bound: deal all samples one by one.
        if ends > bound(workers) * lower_bound(sizes, pace):
            chosen = _placed(sizes, pace, begin, least, most, batch)
    result = np.empty(batch, np.int64)
    result[order] = chosen
    return result


def _placed(sizes: Array, pace: Array, overhead: Array, least: Counts, most: Counts, tail: int) -> Counts:
    """The worker of each sample, the longest first, (B,); the last ``tail`` of them are dealt one by one."""
    batch, start, free = len(sizes), 0, np.zeros(len(pace), np.int64)
    state = _Ends(pace, overhead, most)
    chosen = np.empty(batch, np.int64)
    while batch - start > tail:
        last = min(batch - tail, start + max(8, int(MOST_OF_REST * (batch - start))))
        stop = start + int(np.searchsorted(-sizes[start:last], -ALIKE * sizes[start], side="right"))
        if stop - start < 8:
            state.one_by_one(sizes[start:stop], chosen[start:stop], free)
        else:
            state.block(sizes[start:stop], chosen[start:stop])
        start = stop
    owed = np.maximum(least - np.bincount(chosen[:start], minlength=len(pace)), 0)
    state.one_by_one(sizes[start:], chosen[start:], owed)
    return chosen


def bound(workers: int) -> float:
    """How far the division may be from the best one, without overheads and limits.

    Args:
        workers: Number of workers, n.

    Returns:
        The largest ratio of its time to the best possible time.
    """
    return 2 * workers / (workers + 1)


def lower_bound(costs: Array, pace: Array) -> float:
    """A time before which no division of these samples ends, if no worker has an overhead.

    The k longest samples run on k workers at most, so they take as long as the k quickest need for them together.

    Args:
        costs: Of the samples, in mean samples, shape (B,).
        pace: Seconds of each worker for a cost of 1, shape (n,).

    Returns:
        Seconds.
    """
    sizes, speeds = np.sort(costs)[::-1], np.sort(1.0 / pace)[::-1]
    alone = np.cumsum(sizes[: len(speeds)]) / np.cumsum(speeds)[: len(sizes)]
    return float(max(sizes.sum() / speeds.sum(), alone.max(initial=0.0)))


def limited(batch: int, pace: Array, least: Counts | None, most: Counts | None) -> tuple[Counts, Counts]:
    """(least, most) of each worker in a round of ``batch`` samples, (n,); PacelineError if most is too small."""
    most = np.full(len(pace), batch) if most is None else np.minimum(most, batch).astype(np.int64)
    most = np.where(np.isfinite(pace), most, 0)
    least = np.zeros(len(pace), np.int64) if least is None else np.minimum(least, most).astype(np.int64)
    if most.sum() < batch:
        raise PacelineError(
            f"the workers' most loads hold {most.sum()} of the round's {batch} samples; raise the limits"
        )
    while least.sum() > batch:  # a short round: the leasts shrink in proportion
        least = least * batch // least.sum()
    return least, most


class _Ends:
    """When each worker ends with the samples dealt to it, and how many more samples it may take."""

    def __init__(self, pace: Array, overhead: Array, most: Counts) -> None:
        self.pace = np.where(most > 0, pace, np.inf)
        self.ends = overhead.astype(float).copy()
        self.room = most.copy()

    def one_by_one(self, sizes: Array, chosen: Counts, owed: Counts) -> None:
        """Deal samples by the rule, one by one, into ``chosen``; owed: samples that each worker must get."""
        pace, ends, room = self.pace, self.ends, self.room
        limited = bool(room.min() < len(sizes)) or not np.isfinite(pace).all()
        owing = int(owed.sum())
        candidate = np.empty(len(pace))
        left = len(sizes)
        picked = []
        for size in sizes.tolist():
            np.multiply(pace, size, out=candidate)
            candidate += ends
            if owing and left == owing:  # workers must get all remaining samples as their least
                candidate[owed == 0] = np.inf
            worker = int(candidate.argmin())
            if owing and owed[worker]:
                owed[worker] -= 1
                owing -= 1
            left -= 1
            ends[worker] = candidate[worker]
            picked.append(worker)
            if limited:
                room[worker] -= 1
                if not room[worker]:
                    pace[worker] = np.inf
        chosen[:] = picked
        if not limited:
            self.room -= np.bincount(chosen, minlength=len(pace))

    def block(self, sizes: Array, chosen: Counts) -> None:
        """Deal nearly equal samples at once: as many to each worker as if they were equal, spread over the block."""
        counts = whole_samples(Linear(self.pace * sizes.mean(), self.ends), len(sizes), 0, self.room)
        has = np.flatnonzero(counts)
        worker = np.repeat(has, counts[has])
        # A worker's k-th of c samples is at (k + 1/2) / c of the block, so that each gets samples of all lengths.
        before = np.cumsum(counts[has]) - counts[has]
        nth = np.arange(len(sizes)) - np.repeat(before, counts[has])
        place = (nth + 0.5) / np.repeat(counts[has], counts[has])
        chosen[:] = worker[np.argsort(place, kind="stable")]
        given = np.bincount(chosen, weights=sizes, minlength=len(counts))
        self.ends[has] += given[has] * self.pace[has]
        self.room -= counts
        self.pace[self.room <= 0] = np.inf
