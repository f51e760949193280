"""Dividing a batch in whole samples, so that it ends as soon as any such division (min-max greedy)."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from paceline.costs import Array, Cost, Linear, halfway
from paceline.few import few
from paceline.rounds import Plan
from paceline.shares import plain
from paceline.shares.level import limits, water_level


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
    if unit == 1 and (found := _of_few(expected, batch, least, most)) is not None:
        return found
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
            ends = np.minimum(cost.seconds((units + rest).astype(np.float64)), np.finfo(float).max)
            last = np.argmin(np.where(units + rest <= unit * high, ends, np.inf), axis=-1, keepdims=True)
            np.put_along_axis(units, last, np.take_along_axis(units, last, -1) + rest, -1)
        return units
    low, high = np.ceil(low), np.minimum(np.floor(high), batch)
    needed = low.sum(-1, keepdims=True)
    low = np.where(needed > total, np.floor(low * (total / np.maximum(needed, 1.0))), low)
    low, high = limits(total, low, high)
    loads = _greedy(cost, _most_together(cost, total, low, high), total, low, high)
    return loads.astype(np.int64)


def _of_few(
    expected: Plan | Cost, batch: int, least: ArrayLike, most: ArrayLike | None
) -> NDArray[np.int64] | None:
    """The same in plain numbers, where they do."""
    shares = expected.shares.tolist() if isinstance(expected, Plan) and few(expected.shares) else None
    cost = expected.costs if isinstance(expected, Plan) else expected
    if isinstance(cost, Linear):
        lines = plain.lines(cost)
    elif cost is None and shares is not None:
        lines = [1.0 / share if share else math.inf for share in shares], [0.0] * len(shares)
    else:
        return None
    if lines is None:
        return None
    n = len(lines[0])
    low, high = plain.each(least, n), plain.each(batch if most is None else most, n)
    if low is None or high is None or (shares is not None and len(shares) != n):
        return None
    if shares is not None:
        low = [one if share > 0 else 0.0 for one, share in zip(low, shares, strict=True)]
    loads = plain.whole(*lines, batch, low, high)
    return None if loads is None else np.array(loads)


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
    loads = np.clip(np.floor(cost.load_at(np.minimum(level, np.finfo(float).max))), low, high)
    # The division above rounds; what counts is the cost as the cost itself computes it.
    loads += (loads < high) & (cost.seconds(loads + 1) <= level)
    loads -= (loads > low) & (cost.seconds(loads) > level)
    return np.where(np.isinf(level), high, loads)  # never is soon enough, even for those who are gone


def _most_together(cost: Cost, total: Array, low: Array, high: Array) -> Array:
    """A start for the greedy steps that leaves few of them: all samples that end before some level.

    Interpolation and bisection of the level in turn, until no row has many samples left, or the level is
    settled to neighbouring floats: then all the rest end at the same time and go out by rank.
    """
    few = 32
    level = water_level(cost, total[..., 0], low, high).seconds[..., None]
    left = np.maximum(level * (1 - 1e-12), 0.0)
    loads = _counts(cost, left, low, high)
    early = loads.sum(-1, keepdims=True) > total  # many end at the same time, or all take no time
    left, loads = np.where(early, 0.0, left), np.where(early, low, loads)
    missing = total - loads.sum(-1, keepdims=True)
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


def _greedy(cost: Cost, loads: Array, total: Array, low: Array, high: Array) -> Array:
    """Gives the rest, one sample at a time, to whoever then ends soonest; the lowest rank wins a tie."""
    loads = np.array(loads)
    left = total - loads.sum(-1, keepdims=True)
    while np.any(left > 0):
        room = loads < high
        # Somebody who never ends comes after all others, but before somebody who is at the limit.
        ends = np.minimum(cost.seconds(np.minimum(loads + 1, high)), np.finfo(float).max)
        chosen = np.argmin(np.where(room, ends, np.inf), axis=-1, keepdims=True)
        gift = (left > 0).astype(float)
        np.put_along_axis(loads, chosen, np.take_along_axis(loads, chosen, -1) + gift, -1)
        left -= gift
    return loads
