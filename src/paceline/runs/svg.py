"""Axes, coordinates and paths for the charts. An SVG goes from 0 to 1000 on both axes, y downwards."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from paceline.runs.run import Array
from paceline.runs.words import number


def down(values: Array, end: float) -> Array:
    """Values as SVG coordinates: 0 at the bottom, ``end`` at the top, what lies above just outside."""
    return 1000 - np.clip(values / end, -0.02, 1.02) * 1000


def path(x: Array, y: Array) -> str:
    """Straight lines through the points, broken at NaN."""
    parts, pen = [], "M"
    for a, b in zip(x.tolist(), y.tolist(), strict=True):
        if b != b or a != a:
            pen = "M"
            continue
        parts.append(f"{pen}{a:.1f} {b:.1f}")
        pen = "L"
    return "".join(parts)


def band(x: Array, low: Array, high: Array) -> str:
    """The area between two curves, each stretch without NaN closed by itself."""
    known = ~(np.isnan(low) | np.isnan(high))
    breaks = np.flatnonzero(np.diff(np.concatenate(([0], known.astype(int), [0]))))
    parts = []
    for start, end in breaks.reshape(-1, 2):
        part = slice(start, end)
        there, back = path(x[part], high[part]), path(x[part][::-1], low[part][::-1])
        parts.append(f"{there}L{back[1:]}Z")
    return "".join(parts)


def box(start: float, width: float, y: float, height: float, span: float) -> str:
    """A box from ``start``, ``width`` long, of seconds on a scale that ends at ``span``."""
    left, width = start / span * 1000, width / span * 1000
    return f"M{left:.1f} {y:.1f}h{width:.1f}v{height:.1f}h{-width:.1f}z"


def whole(values: Array) -> list[int | None]:
    """Coordinates for the tooltips' data; None if unknown."""
    return [None if value != value else round(value) for value in values.tolist()]


TIME_STEPS = (60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 28800, 86400)
UNITS = (
    (1e-3, "µs", 1e-6),
    (1.0, "ms", 1e-3),
    (120.0, "s", 1.0),
    (7200.0, "min", 60.0),
)  # below, name, seconds


class Axis(NamedTuple):
    """An axis: what it shows with its unit, where it begins and ends, and its ticks: (place, text).

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
    """An axis of round numbers, from the first to the one before the last."""
    first, end = span
    return Axis(
        "round", first, end, [(x, f"{x:,.0f}") for x in ticks(end, 5, whole=True, low=first)], rounds=True
    )


def time_axis(title: str, end: float, start: float = 0.0, count: int = 4) -> Axis:
    """An axis of seconds, in the one unit that suits its end."""
    unit, length = next(((unit, length) for below, unit, length in UNITS if end < below), ("h", 3600.0))
    marks = [(x, number(x / length)) for x in time_ticks(end, count, low=start)]
    return Axis(f"{title} ({unit})", start, end, marks)


def amount_axis(title: str, end: float) -> Axis:
    """An axis of plain numbers, from 0."""
    return Axis(title, 0.0, end, [(y, number(y)) for y in ticks(end)])


def percent_axis(title: str, end: float = 1.0) -> Axis:
    """An axis of portions in per cent, from 0."""
    return Axis(f"{title} (%)", 0.0, end, [(y, number(100 * y)) for y in ticks(end)])


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
