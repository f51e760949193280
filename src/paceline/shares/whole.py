"""Dividing a batch in whole samples, so that it ends as soon as any such division (min-max greedy)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from paceline.costs import Array, Cost, Linear, halfway
from paceline.rounds import Plan
from paceline.shares.level import level_within, limits

LARGEST = np.finfo(float).max
CANDIDATES = 2**18  # samples that are compared with each other at most


def whole_samples(
    expected: Plan | Cost,
    batch: int,
    least: ArrayLike = 0.0,
    most: ArrayLike | None = None,
    unit: int = 1,
) -> NDArray[np.int64]:
    """Samples for each worker, shape (..., n): they sum exactly to ``batch``, and no others end sooner.

    expected: a cost, or a plan; a plan without costs stands for seconds_i(b) = b / share_i. Ties go to the
    lowest rank. least, most: samples, as for a full batch; where a short batch is smaller than the sum of the
    leasts, they shrink in proportion, and a worker whom a plan gives nothing needs no least. unit: loads are
    multiples of so many samples, but for one worker that takes the remainder of a batch that is none.
    Raises PacelineError when the mosts cannot hold the batch.

    The result is that of giving one sample after another to whoever then ends soonest (exact for
    non-decreasing costs); all but a few of these steps are taken together.
    """
    total = np.asarray(float(batch))[None]
    low, high = np.asarray(least, float), np.asarray(batch if most is None else most, float)
    if isinstance(expected, Plan):
        low = np.where(expected.shares > 0, low, 0.0)
        with np.errstate(divide="ignore"):
            cost = expected.costs or Linear(1.0 / expected.shares, np.zeros_like(expected.shares))
        low, high = np.broadcast_arrays(low, high, expected.shares)[:2]
    else:
        cost = expected
    if unit > 1:
        low, high = np.ceil(low / unit), np.floor(high / unit)
        units = whole_samples(_Units(cost, float(unit)), batch // unit, low, high) * unit
        rest = batch % unit
        if rest:
            ends = np.minimum(cost.seconds((units + rest).astype(np.float64)), LARGEST)
            last = np.argmin(np.where(units + rest <= unit * high, ends, np.inf), axis=-1, keepdims=True)
            np.put_along_axis(units, last, np.take_along_axis(units, last, -1) + rest, -1)
        return units
    low, high = np.ceil(low), np.minimum(np.floor(high), batch)
    if ((needed := low.sum(-1, keepdims=True)) > total).any():
        low = np.where(needed > total, np.floor(low * (total / np.maximum(needed, 1.0))), low)
    low, high = limits(total, low, high)
    loads = _most_together(cost, total, low, high)
    return _with_rest(cost, loads, total, high).astype(np.int64)


@dataclass(frozen=True, slots=True)
class _Units:
    """A cost of loads counted in units of several samples."""

    cost: Cost
    unit: float

    def seconds(self, load: Array) -> Array:
        return self.cost.seconds(load * self.unit)

    def load_at(self, seconds: Array) -> Array:
        return self.cost.load_at(seconds) / self.unit


def _counts(cost: Cost, level: Array, low: Array, high: Array) -> Array:
    """Whole samples that each worker can end by ``level``, within its limits."""
    loads = np.floor(cost.load_at(np.minimum(level, LARGEST)))
    loads = np.minimum(np.maximum(loads, low), high)
    # The division above rounds; what counts is the cost as the cost itself computes it.
    loads += (loads < high) & (cost.seconds(loads + 1) <= level)
    loads -= (loads > low) & (cost.seconds(loads) > level)
    return np.where(np.isinf(level), high, loads)  # never is soon enough, even for those who are gone


def _most_together(cost: Cost, total: Array, low: Array, high: Array) -> Array:
    """All samples that end before some level, chosen so that few are left to give out.

    Interpolation and bisection of the level in turn, until no row has many samples left, or the level is
    settled to neighbouring floats: then all the rest end at the same time and go out by rank.
    """
    left = np.maximum(level_within(cost, total, low, high)[0] * (1 - 1e-12), 0.0)
    loads = _counts(cost, left, low, high)
    missing = total - loads.sum(-1, keepdims=True)
    if (early := missing < 0).any():  # many end at the same time, or all take no time
        left, loads = np.where(early, 0.0, left), np.where(early, low, loads)
        missing = total - loads.sum(-1, keepdims=True)
    few = min(max(CANDIDATES // loads.size, 1), 32)
    if np.max(missing) <= few:
        return loads
    ends = cost.seconds(np.minimum(loads + 1, high))
    right = np.maximum(np.max(np.where(np.isfinite(ends), ends, 0.0), axis=-1, keepdims=True), left)
    over = _counts(cost, right, low, high).sum(-1, keepdims=True) - total
    right = np.where(over >= 0, right, np.inf)
    attempt = 0
    while np.any(missing > few):
        middle = halfway(left, right)
        if attempt % 4 == 0:  # where all that is left ends together, the bracket is settled already
            ends = np.where(loads < high, cost.seconds(np.minimum(loads + 1, high)), np.inf)
            middle = np.where(ends.min(-1, keepdims=True) >= right, left, middle)
        if not np.any(middle > left):
            room = _counts(cost, right, low, high) - loads
            before = np.cumsum(room, axis=-1) - room
            return loads + np.clip(missing - before, 0.0, room)
        if attempt % 2 == 0 and np.isfinite(right).all():
            part = np.maximum(missing - few / 2, 0.0) / np.maximum(missing + over, 1.0)
            guess = left + (right - left) * part
            middle = np.where((left < guess) & (guess < right) & (middle > left), guess, middle)
        attempt += 1
        counts = _counts(cost, middle, low, high)
        excess = counts.sum(-1, keepdims=True) - total
        fits = excess <= 0
        left, right = np.where(fits, middle, left), np.where(fits, right, middle)
        loads, missing = np.where(fits, counts, loads), np.where(fits, -excess, missing)
        over = np.where(fits, over, excess)
    return loads


def _with_rest(cost: Cost, loads: Array, total: Array, high: Array) -> Array:
    """Gives the rest, one sample after another, to whoever then ends soonest; the lowest rank wins a tie.

    Each worker's next samples end one after another, so these steps are the samples in the order of their ends.
    """
    left = total - loads.sum(-1, keepdims=True)
    if not (most := int(left.max(initial=0.0))) > 0:
        return loads
    further = loads + np.arange(1.0, most + 1).reshape(-1, *[1] * loads.ndim)  # (samples, ..., n)
    # Somebody who never ends comes after all others, but before somebody who is at the limit.
    ends = np.minimum(cost.seconds(np.minimum(further, high)), LARGEST)
    ends = np.moveaxis(np.where(further > high, np.inf, ends), 0, -1)
    order = ends.reshape(*loads.shape[:-1], -1).argsort(-1, kind="stable")
    given: Array = (order.argsort(-1) < left).reshape(ends.shape).sum(-1)
    return loads + given
