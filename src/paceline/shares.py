"""Division of a batch: the water level, projections, proportions, and whole samples (min-max greedy).

All functions work on arrays of shape (..., n), each row by itself. Limits are loads (or shares) of shape (n,) or
(..., n); limits that cannot hold the batch raise PacelineError and say by how much.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from paceline.costs import QUICKEST, Array, Cost, Linear, halfway, numbers
from paceline.errors import PacelineError, short, whole
from paceline.rounds import Plan

__all__ = ["WaterLevel", "project", "proportional", "water_level", "whole_samples"]

LARGEST = np.finfo(float).max
CLOSE = 1e-14  # relative error that the sum of the loads may have


class WaterLevel(NamedTuple):
    """A division that ends soonest.

    Attributes:
        seconds: The common finishing time, shape (...,).
        loads: Samples of each worker, shape (..., n); they sum to the batch.
    """

    seconds: Array
    loads: Array


def water_level(
    cost: Cost,
    batch: ArrayLike,
    least: ArrayLike = 0.0,
    most: ArrayLike | None = None,
    guess: ArrayLike | None = None,
) -> WaterLevel:
    """Divide ``batch`` so that it ends soonest: min over loads of max_i seconds_i(load_i).

    Linear costs are solved exactly in a few passes of O(n); others by bisection down to neighbouring floats; what
    these cannot resolve (a jump) is divided in proportion.

    Args:
        cost: Seconds of each worker as a function of its load.
        batch: Samples, a number or shape (...,).
        least: Samples that each worker takes at least, a number or shape (n,) or (..., n).
        most: Samples that each worker takes at most, a number or shape (n,) or (..., n); default ``batch``.
        guess: A level near the answer, shape (...,), or NaN, which saves a pass or two over the workers of a linear
            cost.

    Returns:
        The finishing time and the loads, which are fractions of samples.

    Raises:
        PacelineError: If the limits cannot hold the batch, or an argument is no number or cost.
    """
    total = _numbers("batch", batch, "a number of samples, or one for each realization")[..., None]
    low, high = _limits(total, least, total if most is None else most)
    level, loads = _level_within(cost, total, low, high, guess)
    return WaterLevel(level[..., 0], loads)


def _level_within(
    cost: Cost, total: Array, low: Array, high: Array, guess: ArrayLike | None = None
) -> tuple[Array, Array]:
    """The level, (..., 1), and the loads, as in ``water_level``; the limits must hold the total, (..., 1)."""
    if not isinstance(cost, Linear):
        if not hasattr(cost, "load_at"):
            raise PacelineError(f"cost={short(cost)}: expected a cost of paceline.costs")
        return _bisect(cost, total, low, high)
    rate = 1.0 / np.maximum(cost.seconds_per_sample, QUICKEST)
    return _fill(rate, cost.overhead * rate, total, low, high, guess)


def project(y: ArrayLike, least: ArrayLike = 0.0, most: ArrayLike = 1.0) -> Array:
    """The nearest point (Euclidean) to ``y`` among divisions within the limits.

    Args:
        y: Any numbers, shape (..., n).
        least: Least share of each worker; broadcasts to (..., n).
        most: Largest share of each worker; broadcasts to (..., n).

    Returns:
        x of shape (..., n), with least <= x <= most and sum 1.

    Raises:
        PacelineError: If the limits cannot hold a sum of 1, or have another shape.
    """
    y, whole = numbers("y", y, "one number for each worker"), np.ones(1)
    low, high = _limits(whole, least, most)
    _fitting(_some("y", y).shape, low, high)
    # x = clip(y - theta, least, most) is a water level with unit speeds and offsets -y; the level is -theta.
    return _fill(np.ones_like(y), -y, whole, low, high, None)[1]


def proportional(weights: ArrayLike, least: ArrayLike = 0.0, most: ArrayLike = 1.0) -> Array:
    """Shares in proportion to ``weights``, cut to the limits.

    Workers with weight 0 get their least, unless no other may take the rest: then they share it equally.

    Args:
        weights: Numbers of 0 or more, shape (..., n).
        least: Least share of each worker; broadcasts to (..., n).
        most: Largest share of each worker; broadcasts to (..., n).

    Returns:
        Shares of shape (..., n), with sum 1.

    Raises:
        PacelineError: If the limits cannot hold a sum of 1, or have another shape.
    """
    weights, whole = numbers("weights", weights, "one number for each worker"), np.ones(1)
    low, high = _limits(whole, least, most)
    _fitting(_some("weights", weights).shape, low, high)
    reach = np.where(weights > 0, high, low).sum(-1, keepdims=True)
    if np.any(reach < whole):
        spare = np.maximum(weights.max(-1, keepdims=True), 1.0) * 1e-12
        weights = np.where(reach < whole, np.maximum(weights, spare), weights)
    return _fill(weights, np.zeros_like(weights), whole, low, high, None)[1]


def _some(name: str, value: Array) -> Array:
    """The numbers of one or more workers. Raises PacelineError if there are none."""
    if not value.size:
        raise PacelineError(f"{name}={short(value.tolist())}: expected one number for each worker")
    return value


def _both(least: ArrayLike, most: ArrayLike) -> tuple[Array, Array]:
    """The limits as arrays of float64."""
    wanted = "a number, or one for each worker"
    return _numbers("least", least, wanted), _numbers("most", most, wanted)


def _numbers(name: str, value: ArrayLike, wanted: str) -> Array:
    """``numbers``; what decisions pass needs no check."""
    if isinstance(value, np.ndarray) and value.dtype == np.float64:
        return value
    if isinstance(value, (int, float)):
        return np.asarray(value, float)
    return numbers(name, value, wanted)


def _fitting(shape: tuple[int, ...], low: Array, high: Array) -> None:
    """Raises PacelineError if the limits are not of this many workers, the last axis of ``shape``."""
    with suppress(ValueError):
        if low.size and high.size and np.broadcast_shapes(shape, low.shape, high.shape):
            return
        if shape == low.shape == high.shape == ():
            return
    raise PacelineError(
        f"least and most have shapes {low.shape} and {high.shape}: expected a number, or one for each of "
        f"{shape[-1] if shape else 1} workers"
    )


def _limits(total: Array, least: ArrayLike, most: ArrayLike) -> tuple[Array, Array]:
    """The limits as arrays. Raises PacelineError if they cannot hold the total, shape (..., 1)."""
    low, high = _both(least, most)
    slack = 1e-9 * np.abs(total)
    if low.ndim and ((over := low.sum(-1, keepdims=True) - total) > slack).any():
        raise PacelineError(
            f"the workers' least loads need {np.max(over):g} more than the {np.max(total):g} to divide; "
            "lower the least loads"
        )
    if high.ndim and high.shape[-1] > 1 and ((short := total - high.sum(-1, keepdims=True)) > slack).any():
        raise PacelineError(
            f"the workers' most loads leave {np.max(short):g} of {np.max(total):g} without a place; "
            "raise the limits"
        )
    return low, high


# If numbers of very different size overflow, the bisection takes over.
@np.errstate(over="ignore", divide="ignore", invalid="ignore")
def _fill(
    rate: Array, offset: Array, total: Array, low: Array, high: Array, guess: ArrayLike | None
) -> tuple[Array, Array]:
    """Solves sum_i clip(rate_i T - offset_i, low_i, high_i) = total for T; returns T (..., 1) and the terms.

    Newton's method on a piecewise linear function within a bracket: it ends on the right piece, where its
    step is the closed form (Cominetti, Mascarenhas and Silva 2014, on the continuous quadratic knapsack).
    """
    level = (total + offset.sum(-1, keepdims=True)) / rate.sum(-1, keepdims=True)
    loads = rate * level
    loads -= offset
    _fitting(loads.shape, low, high)
    settled = ((low <= loads) & (loads <= high)).all(-1, keepdims=True)  # no limit binds
    settled &= np.abs(total - loads.sum(-1, keepdims=True)) <= CLOSE * np.abs(total)
    if settled.all():
        return level, loads
    if guess is not None:
        started = np.asarray(guess, float)[..., None]
        level = np.where(settled | np.isnan(started), level, started)
    left, right = np.full(level.shape, -np.inf), np.full(level.shape, np.inf)
    for attempt in range(200):
        free = rate * level
        free -= offset
        loads = np.minimum(np.maximum(free, low), high)
        short = total - loads.sum(-1, keepdims=True)
        unfilled = short != 0
        if not unfilled.any():
            return level, loads
        left, right = np.where(short > 0, level, left), np.where(short < 0, level, right)
        step = level + short / np.where(loads == free, rate, 0.0).sum(-1, keepdims=True)
        blind = unfilled & ~((left <= step) & (step <= right) & np.isfinite(step))
        if attempt >= 12 and attempt % 2 == 1:
            blind = unfilled  # the steps alternate around the solution: halve the bracket instead
        if blind.any():
            start, end = _ends(rate, offset, low, high)
            left = np.where(blind, np.maximum(left, np.nextafter(start, -np.inf)), left)
            right = np.where(blind, np.minimum(right, np.nextafter(end, np.inf)), right)
            step = np.where(blind, 0.5 * (left + right), step)
        # A settled realization keeps its level while the others continue.
        settled = settled | ~unfilled | (np.abs(step - level) <= 4e-16 * np.abs(level))
        if settled.all():
            break
        level = np.where(settled, level, step)
    missed = ~(np.abs(short) <= 1e-12 * np.abs(total))
    if missed.any():  # a worker is so quick, or so late, that neighbouring floats are far apart
        bisected, divided = _bisect_lines(rate, offset, total, low, high)
        return np.where(missed, bisected, level), np.where(missed, divided, loads)
    return level, loads


def _bisect_lines(rate: Array, offset: Array, total: Array, low: Array, high: Array) -> tuple[Array, Array]:
    """Like ``_fill``, by bisection down to neighbouring floats; what these cannot resolve goes in proportion."""
    start, end = _ends(rate, offset, low, high)
    # The bracket exceeds the rounding error of the sums, so that every worker is at a limit at its ends.
    left = np.nan_to_num(start - 1e-9 * np.abs(start))
    right = np.nan_to_num(end + 1e-9 * np.abs(end))
    shape = np.broadcast_shapes(total.shape, left.shape)  # one total may serve many realizations
    left, right = (np.broadcast_to(level, shape) for level in (np.minimum(left, right), right))
    level, loads = _narrowed(lambda level: np.clip(rate * level - offset, low, high), total, left, right)
    # The rounding residue goes by speed, since it takes a slow worker long, to the workers that begin before the
    # level; what no worker with a speed can take goes to those without one.
    loads = _topped_up(loads, np.where(rate * level - offset >= low, rate, 0.0), total, low, high, 0.0)
    return level, _topped_up(loads, high - loads, total, low, high, 1e-12)


def _narrowed(
    loads_at: Callable[[Array], Array], total: Array, left: Array, right: Array
) -> tuple[Array, Array]:
    """The level between two others at which the total is reached, and the loads: a mix of those on both sides."""
    while (open_ := (middle := halfway(left, right)) > left).any():
        enough = loads_at(middle).sum(-1, keepdims=True) >= total
        left, right = np.where(open_ & ~enough, middle, left), np.where(open_ & enough, middle, right)
    return right, _between(loads_at(left), loads_at(right), total)


def _topped_up(
    loads: Array, weights: Array, total: Array, low: Array, high: Array, tolerance: float
) -> Array:
    """The loads, with what they lack of the total added in proportion to the weights, within the limits; nothing is
    added if the lack is at most a part ``tolerance`` of the total."""
    short = total - loads.sum(-1, keepdims=True)
    room = np.where(short > 0, high - loads, loads - low)
    weights = np.where(room > 0, weights, 0.0)
    largest = weights.max(-1, keepdims=True)
    weights = weights / np.where(largest > 0, largest, 1.0)  # so that their sum is finite
    parts = short * weights / np.maximum(weights.sum(-1, keepdims=True), 1.0)
    return loads + np.where(np.abs(short) > tolerance * np.abs(total), np.clip(parts, -room, room), 0.0)


def _ends(rate: Array, offset: Array, low: Array, high: Array) -> tuple[Array, Array]:
    """(the level up to which every load is at its least, the one from which every load is at its most), (..., 1)."""
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        start = np.where(rate > 0, (offset + low) / rate, np.inf).min(-1, keepdims=True)
        end = np.where(rate > 0, (offset + high) / rate, -np.inf).max(-1, keepdims=True)
    return start, end


def _bisect(cost: Cost, total: Array, low: Array, high: Array) -> tuple[Array, Array]:
    """The level, (..., 1), and the loads for any cost, by bisection down to neighbouring floats."""

    def loads_at(level: Array) -> Array:
        return np.clip(cost.load_at(level), low, high)

    _fitting(np.shape(cost.load_at(np.zeros_like(total))), low, high)
    at_once = loads_at(np.zeros_like(total))
    left = np.zeros((*at_once.shape[:-1], 1))
    level, loads = _narrowed(loads_at, total, left, np.full_like(left, LARGEST))
    done = at_once.sum(-1, keepdims=True) >= total  # the whole batch takes no time
    if done.any():
        mixed = _between(np.broadcast_to(low, at_once.shape), at_once, total)
        level, loads = np.where(done, 0.0, level), np.where(done, mixed, loads)
    return level, loads


def _between(below: Array, above: Array, total: Array) -> Array:
    """The mix of two divisions, one too small and one too large, that sums to the total."""
    small, large = below.sum(-1, keepdims=True), above.sum(-1, keepdims=True)
    part = np.clip((total - small) / np.where(large > small, large - small, 1.0), 0.0, 1.0)
    return below + part * (above - below)


def whole_samples(
    expected: Plan | Cost,
    batch: int,
    least: ArrayLike = 0.0,
    most: ArrayLike | None = None,
    unit: int = 1,
    fewest: int = 1,
) -> NDArray[np.int64]:
    """Divide ``batch`` into whole samples so that no other division ends sooner.

    The result is the same as that of giving one sample after another to the worker that then ends soonest (exact for
    non-decreasing costs); all but a few of these steps are done at once. Ties go to the lowest rank.

    Args:
        expected: A cost, or a plan; a plan without costs means seconds_i(b) = b / share_i.
        batch: Samples to divide, 0 or more.
        least: Samples of a full batch that each worker takes at least, a number or shape (n,) or (..., n). If a short
            batch is smaller than their sum, they shrink in proportion; a worker to which a plan gives nothing needs
            no least.
        most: Samples that each worker takes at most, a number or shape (n,) or (..., n); default ``batch``.
        unit: Loads are multiples of this many samples, except that one worker takes the remainder of a batch that is
            not a multiple.
        fewest: A smaller load is moved to the worker with the largest one, the lowest rank of equals, even beyond its
            most.

    Returns:
        Samples of each worker, int64 of shape (..., n); they sum to ``batch``.

    Raises:
        PacelineError: If the mosts cannot hold the batch, or an argument has another shape or type.
    """
    whole("batch", batch, 0)
    if fewest != 1:
        whole("fewest", fewest)
        return _moved(whole_samples(expected, batch, least, most, unit), fewest)
    total = np.asarray(float(batch))[None]
    low, high = _both(least, batch if most is None else most)
    near = None  # fractional loads that are close to the best, if known
    if isinstance(expected, Plan):
        _fitting(expected.shares.shape, low, high)
        low = np.where(expected.shares > 0, low, 0.0)
        cost = expected.costs or expected.by_shares()
        near = expected.shares * float(batch)
    else:
        cost = expected
    if unit > 1:
        low, high = np.ceil(low / unit), np.floor(high / unit)
        _limits(total // unit * unit, 0.0, high * unit)  # here, so that the message counts samples, not units
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
    _, high = _limits(total, 0.0, high)
    started = None if near is None else _first_to_end(cost, near, total, low, high)
    if started is None:
        loads = _most_together(cost, total, low, high)
        started = loads, total - loads.sum(-1, keepdims=True), _ends_with(cost, loads, 1, high)
    return _with_rest(cost, *started, high).astype(np.int64)


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
    # ``load_at`` rounds, so the counts are checked with ``seconds``.
    loads += (loads < high) & (cost.seconds(loads + 1) <= level)
    loads -= (loads > low) & (cost.seconds(loads) > level)
    return np.where(np.isinf(level), high, loads)  # without a level, even absent workers take their most


def _ends_with(cost: Cost, loads: Array, more: int, high: Array) -> Array:
    """When each worker ends with ``more`` further samples. A worker that never ends sorts after all others, but
    before a worker at its limit."""
    loads = loads + more
    return np.where(loads <= high, np.minimum(cost.seconds(loads), LARGEST), np.inf)


def _first_to_end(
    cost: Cost, near: Array, total: Array, low: Array, high: Array
) -> tuple[Array, Array, Array] | None:
    """(the whole samples of loads that are ``near`` the best, how many remain to be given out, (..., 1), when each
    worker would end with one more); None if many remain, or if a remaining one could end before a given one."""
    loads = np.minimum(np.maximum(np.floor(near), low), high)
    left = total - loads.sum(-1, keepdims=True)
    if not ((left >= 0) & (left <= loads.shape[-1])).all():
        return None
    last = np.where(loads > low, cost.seconds(loads), 0.0).max(-1)
    soonest = _ends_with(cost, loads, 1, high)
    return (loads, left, soonest) if (last < soonest.min(-1)).all() else None


def _most_together(cost: Cost, total: Array, low: Array, high: Array) -> Array:
    """The loads that end before some level, chosen so that few samples remain to be given out.

    Interpolation and bisection of the level alternate until no row has many samples left, or the level is
    known to neighbouring floats: then all the rest end at the same time and are given out by rank.
    """
    left = np.maximum(_level_within(cost, total, low, high)[0] * (1 - 1e-12), 0.0)
    loads = _counts(cost, left, low, high)
    missing = total - loads.sum(-1, keepdims=True)
    if (early := missing < 0).any():  # many end at the same time, or all take no time
        left, loads = np.where(early, 0.0, left), np.where(early, low, loads)
        missing = total - loads.sum(-1, keepdims=True)
    few = min(max(32, loads.shape[-1]), 1000)  # as a rule a fraction of a sample for each worker
    if np.max(missing) <= few:
        return loads
    ends = cost.seconds(np.minimum(loads + 1, high))
    right = np.maximum(np.max(np.where(np.isfinite(ends), ends, 0.0), axis=-1, keepdims=True), left)
    over = _counts(cost, right, low, high).sum(-1, keepdims=True) - total
    right = np.where(over >= 0, right, np.inf)
    attempt = 0
    while np.any(missing > few):
        middle = halfway(left, right)
        if attempt % 4 == 0:  # if all remaining samples end together, the bracket needs no further halving
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


def _with_rest(cost: Cost, loads: Array, left: Array, soonest: Array, high: Array) -> Array:
    """Gives what is left, one sample after another, to the worker that then ends soonest; the lowest rank wins a tie.

    left: samples, (..., 1). soonest: when each ends with one more, (..., n). One pass gives a sample to each worker
    that would end with it before any worker would end with two more, the soonest first.
    """
    ranks = np.arange(loads.shape[-1])
    while (left > 1).any():
        given = soonest < _ends_with(cost, loads, 2, high).min(-1, keepdims=True)
        given |= ranks == soonest.argmin(-1)[..., None]
        if (given.sum(-1, keepdims=True) > left).any():
            given &= soonest.argsort(-1, kind="stable").argsort(-1) < left
        loads = loads + given
        left = left - given.sum(-1, keepdims=True)
        soonest = _ends_with(cost, loads, 1, high)
    return loads + ((ranks == soonest.argmin(-1)[..., None]) & (left > 0))


def _moved(loads: NDArray[np.int64], fewest: int) -> NDArray[np.int64]:
    """The loads, (..., n), with those below ``fewest`` moved to the largest one."""
    small = (loads > 0) & (loads < fewest)
    kept = np.where(small, 0, loads)
    takes = np.where(kept.any(-1, keepdims=True), kept, small).argmax(-1)[..., None]
    together = (loads - kept).sum(-1, keepdims=True)
    return kept + np.where(np.arange(loads.shape[-1]) == takes, together, 0)
