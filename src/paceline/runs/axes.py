"""Scales for pictures: axes with their titles, round ticks, and long series thinned to what a screen can show."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from paceline.runs.run import Array
from paceline.runs.words import number

TIME_STEPS = (60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 28800, 86400)
UNITS = (
    (1e-3, "µs", 1e-6),
    (1.0, "ms", 1e-3),
    (120.0, "s", 1.0),
    (7200.0, "min", 60.0),
)  # below, name, seconds


class Axis(NamedTuple):
    """What an axis tells with its unit, where it begins and ends, and its ticks: (place, text).

    rounds: its numbers are those of rounds.
    """

    title: str
    start: float
    end: float
    ticks: list[tuple[float, str]]
    rounds: bool = False

    def at(self, values: Array) -> Array:
        """Places on it: 0 at its start, 1 at its end."""
        return (values - self.start) / (self.end - self.start)


def round_axis(span: tuple[float, float]) -> Axis:
    """Of round numbers, from the first up to and without the last."""
    first, end = span
    return Axis(
        "round", first, end, [(x, f"{x:,.0f}") for x in ticks(end, 5, whole=True, low=first)], rounds=True
    )


def time_axis(title: str, end: float, start: float = 0.0, count: int = 4) -> Axis:
    """Of seconds, told in one unit: that which suits its end."""
    unit, length = next(((unit, length) for below, unit, length in UNITS if end < below), ("h", 3600.0))
    marks = [(x, number(x / length)) for x in time_ticks(end, count, low=start)]
    return Axis(f"{title} ({unit})", start, end, marks)


def amount_axis(title: str, end: float) -> Axis:
    """Of plain numbers, from 0."""
    return Axis(title, 0.0, end, [(y, number(y)) for y in ticks(end)])


def percent_axis(title: str, end: float = 1.0) -> Axis:
    """Of portions, told in per cent, from 0."""
    return Axis(f"{title} (%)", 0.0, end, [(y, number(100 * y)) for y in ticks(end)])


class Thin(NamedTuple):
    """A series of T values in buckets of equal length; NaN where a bucket knows none.

    edges: index of each bucket's first value, and T, shape (buckets + 1,).
    mean, low, high: shape (buckets,) or (buckets, n).
    """

    edges: NDArray[np.int64]
    mean: Array
    low: Array
    high: Array


def edges(start: int, end: int, limit: int = 300) -> NDArray[np.int64]:
    """Cut ``start`` to ``end`` into about ``limit`` buckets at most; their first places, and ``end``.

    Buckets hold 1, 2, 3, 4, 6, 8, 12, ... values and begin at multiples of that, so that a series that grows
    keeps its buckets, and what was drawn of it stays.
    """
    size = 1
    while size * limit < end - start:
        size = 3 * size // 2 if size & (size - 1) == 0 and size > 1 else max(4 * size // 3, size + 1)
    inner = np.arange((start // size + 1) * size, end, size)
    return np.concatenate(([start], inner, [end])).astype(np.int64)


def thin(values: Array, limit: int | NDArray[np.int64] = 300) -> Thin:
    """At most about ``limit`` buckets of values of shape (T,) or (T, n), or the buckets between given edges."""
    at = edges(0, len(values), limit) if isinstance(limit, int) else limit
    starts, known = at[:-1], ~np.isnan(values)
    total = np.add.reduceat(np.where(known, values, 0.0), starts, axis=0)
    number = np.add.reduceat(known.astype(float), starts, axis=0)
    some = number > 0
    return Thin(
        at,
        np.divide(total, number, out=np.full(total.shape, np.nan), where=some),
        np.where(some, np.minimum.reduceat(np.where(known, values, np.inf), starts, axis=0), np.nan),
        np.where(some, np.maximum.reduceat(np.where(known, values, -np.inf), starts, axis=0), np.nan),
    )


def ticks(high: float, count: int = 4, whole: bool = False, low: float = 0.0) -> list[float]:
    """About ``count`` round numbers from ``low`` to ``high``."""
    if not high > low:
        return [low]
    rough = (high - low) / count
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= rough * 0.999)
    if whole:
        step = max(1.0, float(math.ceil(step)))
    return _multiples(low, high, step)


def time_ticks(high: float, count: int = 5, low: float = 0.0) -> list[float]:
    """About ``count`` round times from ``low`` to ``high`` seconds; whole minutes and hours where they suit."""
    length = high - low
    if length < 120:
        return ticks(high, count, low=low)
    step = next(
        (step for step in TIME_STEPS if step >= length / count), 86400 * math.ceil(length / count / 86400)
    )
    return _multiples(low, high, float(step))


def _multiples(low: float, high: float, step: float) -> list[float]:
    return [i * step for i in range(math.ceil(low / step - 1e-9), int(high / step + 1e-9) + 1)]


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
