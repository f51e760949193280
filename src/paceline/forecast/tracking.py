"""``tracking``, the forecast of ``level``: it averages a worker's constant pace, and follows a change at once.

It is a Kalman filter of the logarithm, which treats twice as slow and twice as fast alike. Its two settings, how
much the pace drifts between rounds and how much a measurement scatters, are learned during the run from how
successive differences vary (drift + 2 scatter) and correlate (-scatter), over all workers of a realization
together. What neither can explain is a change or a spike, and the next measurement shows which: if it is as far off
again, the filter restarts from there; if not, the filter continues from before. Until then the filter follows the
measurement wholly, since following a spike costs far less than ignoring a change. If few of the changes before
lasted, it follows in part, and hardly at all once there were only spikes. If a pace falls short of the change by more
than it scatters, the change did not last: if seconds hardly depend on the load, a worker that got less load after a
spike still looks slow.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from paceline.forecast.portable_math import exp, log
from paceline.forecast.protocol import Forecast, Reading, seen
from paceline.rounds import Array

__all__ = ["Track", "follow", "start"]

FIRST_SCATTER = 0.02  # relative scatter that is assumed before any measurement
MEMORY = 0.97  # factor on the weight of earlier rounds in drift and scatter, each round
CHANGE = 3.5  # standard deviations beyond which an error is a change or a spike,
LEAST_CHANGE = 0.15  # and the relative change below which it is neither
DOUBT = 2.0  # standard errors by which the drift must exceed what noise alone would show
LEAST_DRIFT = 1e-3  # the least drift, as a part of the squared differences
OUTLIER = 3.0  # standard deviations to which differences are cut before drift and scatter are learned,
LEAST_OUTLIER = 0.3  # but not below this relative difference
SHORT = 1.5  # usual differences by which a pace may fall short of a change that lasted
BEFORE = 3.0  # changes: the weight of the earlier portion of lasting ones, beside this round's
FULL = 0.75  # portion of lasting changes from which on the next change is followed wholly


class Track(NamedTuple):
    """The estimates of each worker, (..., n), and those learned from all of them, (..., 1).

    Attributes:
        mean: Log of the pace; NaN before a worker's first measurement.
        variance: Variance of the mean.
        newest: Log of the last measurement.
        change: Its difference from the one before.
        squares: Weighted sum of squared differences, (..., 1).
        products: Weighted sum of products of successive differences, (..., 1).
        weight: Weighted number of differences, (..., 1).
        changed: Whether the last measurement was a change, which mean and variance leave out.
        lasting: Portion of these changes that lasted, (..., 1).
    """

    mean: Array
    variance: Array
    newest: Array
    change: Array
    squares: Array
    products: Array
    weight: Array
    changed: NDArray[np.bool_]
    lasting: Array


def start(shape: tuple[int, ...]) -> Track:
    """The estimates before any measurement.

    Args:
        shape: Shape of the measurements, (..., n).

    Returns:
        Estimates that know nothing.
    """
    unknown, shared = np.full(shape, np.nan), np.ones((*shape[:-1], 1))
    square = 2 * FIRST_SCATTER**2
    sums = square * shared, -square / 4 * shared, shared
    changed = np.zeros(shape, bool)
    return Track(unknown, np.full(shape, square), unknown, np.zeros(shape), *sums, changed, shared)


def follow(track: Track, values: Array) -> tuple[Array, Array, Track]:
    """Learn from one more measurement of each worker.

    Args:
        track: The estimates so far.
        values: Measured positive paces (for example seconds per sample), shape (..., n); NaN if nothing was measured.

    Returns:
        The expected pace and the weight that each measurement got (0 if there was none), both of shape (..., n), and
        the new estimates.
    """
    y = log(values)
    change = y - track.newest
    known = not np.isnan(change).any()  # the usual case, which needs no masks
    portion: Array | float = 1.0
    if not known:
        comparable = ~np.isnan(change)
        change = np.where(comparable, change, 0.0)
        portion = comparable.mean(-1, keepdims=True)

    usual = np.sqrt(track.squares / track.weight)
    limit = np.maximum(OUTLIER * usual, LEAST_OUTLIER)
    change = np.minimum(np.maximum(change, -limit), limit)
    workers = y.shape[-1]
    squares = MEMORY * track.squares + (change * change).sum(-1, keepdims=True) / workers
    products = MEMORY * track.products + (change * track.change).sum(-1, keepdims=True) / workers
    weight = MEMORY * track.weight + portion
    sums, both = (squares, products, weight), squares / weight
    drifting = 1 + 2 * products / squares - DOUBT / np.sqrt(workers * weight)
    drift = both * np.minimum(np.maximum(drifting, LEAST_DRIFT), 1.0)
    scatter = 0.5 * (both - drift) + 1e-8

    mean, variance, lasting = track.mean, track.variance, track.lasting
    if track.changed.any():
        decided = track.changed & ~np.isnan(y)
        step = track.newest - mean
        size = np.abs(step)
        lasts = decided & (np.sign(step) * (y - mean) > np.maximum(0.5 * size, size - SHORT * np.sqrt(both)))
        number = decided.sum(-1, keepdims=True)
        lasting = (BEFORE * lasting + lasts.sum(-1, keepdims=True)) / (BEFORE + number)
        mean, variance = np.where(lasts, track.newest, mean), np.where(lasts, scatter, variance)

    error = y - mean
    before = variance + drift
    doubt = before + scatter
    gain = before / doubt
    doubt *= CHANGE**2
    np.maximum(doubt, LEAST_CHANGE**2, out=doubt)
    changed = error * error > doubt
    expected, variance = mean + gain * error, gain * scatter
    if not known:
        unseen, first = np.isnan(y), np.isnan(mean)
        expected = np.where(unseen, mean, np.where(first, y, expected))
        variance = np.where(unseen, before, np.where(first, scatter, variance))
        gain = np.where(unseen, 0.0, np.where(first, 1.0, gain))
        changed, y = np.where(unseen, track.changed, changed), np.where(unseen, track.newest, y)
    if not changed.any():
        return exp(expected), gain, Track(expected, variance, y, change, *sums, changed, lasting)
    followed = np.minimum(lasting / FULL, 1.0)
    mean, variance = np.where(changed, mean, expected), np.where(changed, before, variance)
    expected = np.where(changed, mean + followed * (y - mean), expected)
    gain = np.where(changed & (gain > 0), followed, gain)
    return exp(expected), gain, Track(mean, variance, y, change, *sums, changed, lasting)


@dataclass(frozen=True, slots=True)
class Tracking(Forecast[Track]):
    """A Kalman filter of the logarithm of seconds per sample that learns its own settings."""

    def init(self, shape: tuple[int, ...]) -> Track:
        return start(shape)

    def step(self, state: Track, reading: Reading) -> tuple[Array, Track]:
        speed = np.where(seen(reading.speed), reading.speed, np.nan)
        expected, _, state = follow(state, 1 / speed)
        return 1 / expected, state
