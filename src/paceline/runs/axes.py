"""Scales for pictures: round ticks, and long series thinned to what a screen can show."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from paceline.runs.run import Array

TIME_STEPS = (60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 28800, 86400)


class Thin(NamedTuple):
    """A series of T values in buckets of equal length; NaN where a bucket knows none.

    edges: index of each bucket's first value, and T, shape (buckets + 1,).
    mean, low, high: shape (buckets,) or (buckets, n).
    """

    edges: NDArray[np.int64]
    mean: Array
    low: Array
    high: Array


def thin(values: Array, limit: int = 300) -> Thin:
    """At most ``limit`` buckets of values of shape (T,) or (T, n)."""
    count = len(values)
    edges = np.unique(np.linspace(0, count, min(count, limit) + 1).astype(np.int64))
    starts, known = edges[:-1], ~np.isnan(values)
    total = np.add.reduceat(np.where(known, values, 0.0), starts, axis=0)
    number = np.add.reduceat(known.astype(float), starts, axis=0)
    some = number > 0
    return Thin(
        edges,
        np.divide(total, number, out=np.full(total.shape, np.nan), where=some),
        np.where(some, np.minimum.reduceat(np.where(known, values, np.inf), starts, axis=0), np.nan),
        np.where(some, np.maximum.reduceat(np.where(known, values, -np.inf), starts, axis=0), np.nan),
    )


def ticks(high: float, count: int = 4, whole: bool = False) -> list[float]:
    """About ``count`` round numbers from 0 to ``high``."""
    if not high > 0:
        return [0.0]
    rough = high / count
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= rough * 0.999)
    if whole:
        step = max(1.0, float(math.ceil(step)))
    return [i * step for i in range(int(high / step + 1e-9) + 1)]


def time_ticks(high: float, count: int = 5) -> list[float]:
    """About ``count`` round times from 0 to ``high`` seconds; whole minutes and hours where they suit."""
    if high < 120:
        return ticks(high, count)
    step = next(
        (step for step in TIME_STEPS if step >= high / count), 86400 * math.ceil(high / count / 86400)
    )
    return [float(i * step) for i in range(int(high / step) + 1)]


def top(*series: Array) -> float:
    """A scale's end that a few spikes do not stretch: the largest value, or little above the usual ones."""
    ends = []
    for values in series:
        known = values[np.isfinite(values)]
        if known.size:
            usual = float(np.quantile(known, 0.98)) * 1.4
            largest = float(known.max()) * 1.05
            ends.append(largest if largest < 1.3 * usual or known.size < 8 else usual)
    return max(ends, default=1.0) or 1.0
