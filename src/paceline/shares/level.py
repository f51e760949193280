"""Dividing a batch in fractions: the water level, the projection, proportions.

Each row of arrays of shape (..., n) is divided by itself.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from paceline.costs import Array, Cost, Linear, halfway
from paceline.durations import QUICKEST
from paceline.errors import PacelineError


class WaterLevel(NamedTuple):
    """The common finishing time and what everybody gets done by then."""

    seconds: Array  # (...,)
    loads: Array  # (..., n), sum to the batch


def water_level(
    cost: Cost,
    batch: ArrayLike,
    least: ArrayLike = 0.0,
    most: ArrayLike | None = None,
    guess: ArrayLike | None = None,
) -> WaterLevel:
    """The division of ``batch`` that ends soonest: min over loads of max_i seconds_i(load_i).

    batch: samples, a number or shape (...,). least, most: samples, default 0 and the batch. guess: a level
    near the answer, shape (...,), or NaN, which saves a pass or two over the workers of a linear cost.

    Linear costs are solved exactly in a handful of passes of O(n); others by bisection down to neighbouring
    floats, with what they cannot resolve (a jump) divided in proportion.
    Raises PacelineError when the limits cannot hold the batch.
    """
    total = np.asarray(batch, float)[..., None]
    low, high = limits(total, least, total if most is None else most)
    level, loads = level_within(cost, total, low, high, guess)
    return WaterLevel(level[..., 0], loads)


def level_within(
    cost: Cost, total: Array, low: Array, high: Array, guess: ArrayLike | None = None
) -> tuple[Array, Array]:
    """The level, shape (..., 1), and the loads, as in ``water_level``, of limits that hold the total, (..., 1)."""
    if not isinstance(cost, Linear):
        return _bisect(cost, total, low, high)
    rate = 1.0 / np.maximum(cost.seconds_per_sample, QUICKEST)
    return _fill(rate, cost.overhead * rate, total, low, high, guess)


def project(y: ArrayLike, least: ArrayLike = 0.0, most: ArrayLike = 1.0, total: float = 1.0) -> Array:
    """The nearest point (Euclidean) to y, shape (..., n), with least <= x <= most and sum ``total``."""
    y = np.asarray(y, float)
    whole = np.asarray(float(total))[None]
    low, high = limits(whole, least, most)
    # x = clip(y - theta, least, most): a water level of unit speeds that start at -y (the level is -theta).
    return _fill(np.ones_like(y), -y, whole, low, high, None)[1]


def proportional(
    weights: ArrayLike, least: ArrayLike = 0.0, most: ArrayLike = 1.0, total: float = 1.0
) -> Array:
    """Portions of ``total`` in proportion to weights (..., n), cut to the limits.

    Weights of 0 get their least, unless nobody else may take what is left: then they share it equally.
    """
    weights = np.asarray(weights, float)
    whole = np.asarray(float(total))[None]
    low, high = limits(whole, least, most)
    reach = np.where(weights > 0, high, low).sum(-1, keepdims=True)
    if np.any(reach < whole):
        spare = np.maximum(weights.max(-1, keepdims=True), 1.0) * 1e-12
        weights = np.where(reach < whole, np.maximum(weights, spare), weights)
    return _fill(weights, np.zeros_like(weights), whole, low, high, None)[1]


def limits(total: Array, least: ArrayLike, most: ArrayLike) -> tuple[Array, Array]:
    """The limits as arrays. Raises PacelineError where they cannot hold the total, shape (..., 1)."""
    low, high = np.asarray(least, float), np.asarray(most, float)
    slack = 1e-9 * np.abs(total)
    if low.ndim and np.any((over := low.sum(-1, keepdims=True) - total) > slack):
        raise PacelineError(
            f"the workers' least loads need {np.max(over):g} more than the {np.max(total):g} to divide; "
            "lower the least loads"
        )
    if high.ndim and high.shape[-1] > 1 and np.any((short := total - high.sum(-1, keepdims=True)) > slack):
        raise PacelineError(
            f"the workers' most loads leave {np.max(short):g} of {np.max(total):g} without a place; "
            "raise the limits"
        )
    return low, high


# Where numbers of unlike size overflow, the bisection takes over.
@np.errstate(over="ignore", divide="ignore", invalid="ignore")
def _fill(
    rate: Array, offset: Array, total: Array, low: Array, high: Array, guess: ArrayLike | None
) -> tuple[Array, Array]:
    """Solves sum_i clip(rate_i T - offset_i, low_i, high_i) = total for T; returns T (..., 1) and the terms.

    Newton's method on a piecewise linear function within a bracket: it ends on the right piece, where its
    step is the closed form (Cominetti, Mascarenhas and Silva 2014, on the continuous quadratic knapsack).
    """
    level = np.full_like(total, np.nan) if guess is None else np.asarray(guess, float)[..., None]
    if np.isnan(level).any():  # as if no limit bound
        level = (total + offset.sum(-1, keepdims=True)) / rate.sum(-1, keepdims=True)
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
            blind = unfilled  # crossing to and fro: halve the bracket instead
        if blind.any():
            left, right = _bracket(rate, offset, low, high, left, right)
            step = np.where(blind, 0.5 * (left + right), step)
        step = np.where(unfilled, step, level)
        if np.all(np.abs(step - level) <= 4e-16 * np.abs(level)):
            break
        level = step
    missed = ~(np.abs(short) <= 1e-12 * np.abs(total))
    if missed.any():  # somebody is so quick, or so late, that neighbouring floats are far apart
        bisected, divided = _bisect_lines(rate, offset, total, low, high)
        return np.where(missed, bisected, level), np.where(missed, divided, loads)
    return level, loads


def _bisect_lines(rate: Array, offset: Array, total: Array, low: Array, high: Array) -> tuple[Array, Array]:
    """The same by bisection down to neighbouring floats, and what they cannot resolve in proportion."""

    def loads_at(level: Array) -> Array:
        return np.clip(rate * level - offset, low, high)

    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        start = np.where(rate > 0, (offset + low) / rate, np.inf).min(-1, keepdims=True)
        end = np.where(rate > 0, (offset + high) / rate, -np.inf).max(-1, keepdims=True)
    # Beyond what rounding takes from the sums: there everybody is at a limit.
    left = np.nan_to_num(start - 1e-9 * np.abs(start))
    right = np.nan_to_num(end + 1e-9 * np.abs(end))
    shape = np.broadcast_shapes(total.shape, left.shape)  # one total may serve many realizations
    left, right = (np.broadcast_to(level, shape) for level in (np.minimum(left, right), right))
    while np.any((middle := _middle(left, right)) > left):
        enough = loads_at(middle).sum(-1, keepdims=True) >= total
        left, right = np.where(enough, left, middle), np.where(enough, middle, right)
    loads = _between(loads_at(left), loads_at(right), total)
    # What rounding leaves goes by speed, since it takes a slow worker long; what nobody with a speed can take goes
    # to those without one.
    loads = _topped_up(loads, rate, total, low, high, 0.0)
    return right, _topped_up(loads, high - loads, total, low, high, 1e-12)


def _topped_up(
    loads: Array, weights: Array, total: Array, low: Array, high: Array, tolerance: float
) -> Array:
    """The loads, and what they lack of the total in proportion to the weights within the limits, where that is more
    than a part ``tolerance`` of the total."""
    short = total - loads.sum(-1, keepdims=True)
    room = np.where(short > 0, high - loads, loads - low)
    weights = np.where(room > 0, weights, 0.0)
    largest = weights.max(-1, keepdims=True)
    weights = weights / np.where(largest > 0, largest, 1.0)  # so that their sum is finite
    parts = short * weights / np.maximum(weights.sum(-1, keepdims=True), 1.0)
    return loads + np.where(np.abs(short) > tolerance * np.abs(total), np.clip(parts, -room, room), 0.0)


def _middle(low: Array, high: Array) -> Array:
    """As ``halfway``, of numbers of any sign."""

    def counted(value: Array) -> NDArray[np.int64]:
        bits = np.ascontiguousarray(value, dtype=float).view(np.int64)
        return np.where(bits < 0, -(bits & np.int64(2**63 - 1)), bits)

    first, last = counted(low), counted(high)
    count = first // 2 + last // 2 + (first & last & 1)
    size = np.ascontiguousarray(np.abs(count)).view(np.float64)
    return np.where(count < 0, -size, size)


def _bracket(
    rate: Array, offset: Array, low: Array, high: Array, left: Array, right: Array
) -> tuple[Array, Array]:
    """Levels at which nobody, and everybody, is at its limit; kept where a tighter bracket is known."""
    with np.errstate(divide="ignore", invalid="ignore"):
        start = np.where(rate > 0, (offset + low) / rate, np.inf).min(-1, keepdims=True)
        end = np.where(rate > 0, (offset + high) / rate, -np.inf).max(-1, keepdims=True)
    return np.maximum(left, np.nextafter(start, -np.inf)), np.minimum(right, np.nextafter(end, np.inf))


def _bisect(cost: Cost, total: Array, low: Array, high: Array) -> tuple[Array, Array]:
    """The same for any cost: the highest level that does not fill the batch, and the next float above it."""

    def loads_at(level: Array) -> Array:
        return np.clip(cost.load_at(level), low, high)

    probe = loads_at(np.zeros_like(total))
    left = np.zeros((*probe.shape[:-1], 1))
    right = np.full_like(left, np.finfo(float).max)
    while np.any((middle := halfway(left, right)) > left):
        enough = loads_at(middle).sum(-1, keepdims=True) >= total
        left, right = np.where(enough, left, middle), np.where(enough, middle, right)
    done = probe.sum(-1, keepdims=True) >= total  # everything takes no time at all
    right = np.where(done, 0.0, right)
    below = np.where(done, np.broadcast_to(low, probe.shape), loads_at(left))
    return right, _between(below, loads_at(right), total)


def _between(below: Array, above: Array, total: Array) -> Array:
    """The mix of two divisions, one too small and one too large, that sums to the total."""
    small, large = below.sum(-1, keepdims=True), above.sum(-1, keepdims=True)
    part = np.clip((total - small) / np.where(large > small, large - small, 1.0), 0.0, 1.0)
    return below + part * (above - below)
