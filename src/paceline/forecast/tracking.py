"""``tracking``: averages while a worker's pace rests, follows at once when it changes: ``level``'s forecast.

A Kalman filter of the logarithm, which treats twice as slow and twice as fast alike. Its two settings, how
much the pace drifts between rounds and how much a measurement scatters, are learned on the way from how
successive differences vary (drift + 2 scatter) and correlate (-scatter), over all workers of a realization
together. What neither can explain is a change: the filter starts again from that measurement. Whether it was
a spike shows a round later, when the old pace returns as another change; believing a spike costs far less
than ignoring a change.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from paceline.forecast.portable_math import exp, log
from paceline.forecast.protocol import Forecast, Reading, seen
from paceline.rounds import Array

__all__ = ["Track", "follow", "start"]

FIRST_SCATTER = 0.02  # relative, expected before anything is known
MEMORY = 0.97  # weight of what was learned of drift and scatter, kept each round
CHANGE = 3.5  # standard deviations beyond which it is a change
LEAST_CHANGE = 0.15  # and the smallest relative change treated so
DOUBT = 2.0  # standard errors by which the part that is drift must stand out from what noise alone would show
LEAST_DRIFT = 1e-3  # part of the squared differences
OUTLIER = 3.0  # standard deviations, and
LEAST_OUTLIER = 0.3  # relative, to which differences are cut before drift and scatter learn from them


class Track(NamedTuple):
    """What is believed of each worker, (..., n), and learned from all of them, (..., 1)."""

    mean: Array  # log of the pace; NaN before a worker's first measurement
    variance: Array  # of that
    newest: Array  # log of the last measurement
    change: Array  # what that differed by from the one before
    squares: Array  # weighted sums of squared differences,
    products: Array  # of products of successive ones,
    weight: Array  # and of their number


def start(shape: tuple[int, ...]) -> Track:
    """Nothing measured yet; shape is (..., n)."""
    unknown, shared = np.full(shape, np.nan), np.ones((*shape[:-1], 1))
    square = 2 * FIRST_SCATTER**2
    sums = square * shared, -square / 4 * shared, shared
    return Track(unknown, np.full(shape, square), unknown, np.zeros(shape), *sums)


def follow(track: Track, values: Array) -> tuple[Array, Array, Track]:
    """The pace to expect, the weight that each measurement got (0 if there was none), and the new state.

    values: measured positive paces (seconds per sample, say), (..., n); NaN if nothing was measured.
    """
    y = log(values)
    error = y - track.mean
    change = y - track.newest
    known = not np.isnan(change).any()  # everybody, and before: the usual case, which needs no masks
    portion: Array | float = 1.0
    if not known:
        comparable = ~np.isnan(change)
        change = np.where(comparable, change, 0.0)
        portion = comparable.mean(-1, keepdims=True)

    usual = np.sqrt(track.squares / track.weight)
    limit = np.maximum(OUTLIER * usual, LEAST_OUTLIER)
    np.clip(change, -limit, limit, out=change)
    workers = y.shape[-1]
    squares = MEMORY * track.squares + (change * change).sum(-1, keepdims=True) / workers
    products = MEMORY * track.products + (change * track.change).sum(-1, keepdims=True) / workers
    weight = MEMORY * track.weight + portion
    both = squares / weight
    drifting = 1 + 2 * products / squares - DOUBT / np.sqrt(workers * weight)
    drift = both * np.clip(drifting, LEAST_DRIFT, 1.0)
    scatter = 0.5 * (both - drift) + 1e-8

    before = track.variance + drift
    doubt = before + scatter
    gain = before / doubt
    doubt *= CHANGE**2
    np.maximum(doubt, LEAST_CHANGE**2, out=doubt)
    fresh = error * error > doubt
    mean = gain * error
    mean += track.mean
    variance = gain * scatter
    if not known:
        fresh |= np.isnan(track.mean)
    if fresh.any():
        mean, gain = np.where(fresh, y, mean), np.where(fresh, 1.0, gain)
        variance = np.where(fresh, scatter, variance)
    if not known:
        seen = ~np.isnan(y)
        mean, gain = np.where(seen, mean, track.mean), np.where(seen, gain, 0.0)
        variance, y = np.where(seen, variance, before), np.where(seen, y, track.newest)
    return exp(mean), gain, Track(mean, variance, y, change, squares, products, weight)


@dataclass(frozen=True, slots=True)
class Tracking(Forecast[Track]):
    """A Kalman filter of the logarithm of seconds per sample that learns its own settings."""

    def init(self, shape: tuple[int, ...]) -> Track:
        return start(shape)

    def step(self, state: Track, reading: Reading) -> tuple[Array, Track]:
        speed = np.where(seen(reading.speed), reading.speed, np.nan)
        expected, _, state = follow(state, 1 / speed)
        return 1 / expected, state
