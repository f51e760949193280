"""Divisions among few workers of linear cost, in plain numbers: see ``paceline.few``.

None leaves the answer to arrays, and also what is to be said where there is none.
"""

from __future__ import annotations

import math
import sys

import numpy as np
from numpy.typing import ArrayLike

from paceline.costs import Linear
from paceline.durations import QUICKEST
from paceline.few import ODD, Numbers, few, total

FEW_LEFT = 32  # samples that go out one by one
MOST_STEPS, NEWTON = 200, 12  # to the level; after the first of them every other one halves the bracket


def lines(cost: Linear) -> tuple[Numbers, Numbers] | None:
    """(seconds per sample, overhead) of each worker, where they are few."""
    slope, overhead = cost.seconds_per_sample, cost.overhead
    if not few(slope) or slope.shape != overhead.shape:
        return None
    return slope.tolist(), overhead.tolist()


def each(values: ArrayLike, workers: int) -> Numbers | None:
    """A limit of each worker, given as one for all or as an array."""
    if isinstance(values, np.ndarray) and values.ndim:
        return values.tolist() if values.shape == (workers,) else None
    return None if np.ndim(values) else [float(values)] * workers  # type: ignore[arg-type]  # one number


def fits(batch: float, low: Numbers, high: Numbers) -> bool:
    """Whether the limits hold the batch for certain."""
    slack = 1e-9 * abs(batch)
    return total(low) - batch <= slack and (len(high) == 1 or batch - total(high) <= slack)


def fill(
    slope: Numbers, overhead: Numbers, batch: float, low: Numbers, high: Numbers, guess: float = math.nan
) -> tuple[float, Numbers] | None:
    """The level at which workers of these costs end, and what each has done by then; see ``water_level``."""
    if not fits(batch, low, high):
        return None
    try:
        rate = [1.0 / (one if one > QUICKEST else QUICKEST) for one in slope]
        offset = [one * each for one, each in zip(overhead, rate, strict=True)]
        level = guess if guess == guess else (batch + total(offset)) / total(rate)
        left, right = -math.inf, math.inf
        for attempt in range(MOST_STEPS):
            free = [each * level - one for each, one in zip(rate, offset, strict=True)]
            loads = [
                least if one < least else most if one > most else one
                for one, least, most in zip(free, low, high, strict=True)
            ]
            short = batch - total(loads)
            if short == 0:
                return level, loads
            if short > 0:
                left = level
            else:
                right = level
            inside = [each if one == load else 0.0 for each, one, load in zip(rate, free, loads, strict=True)]
            slopes = total(inside)
            step = level + short / slopes if slopes else math.inf
            inward = left <= step <= right and math.isfinite(step)
            if not inward or (attempt >= NEWTON and attempt % 2 == 1):
                left, right = _bracket(rate, offset, low, high, left, right)
                step = 0.5 * (left + right)
            if abs(step - level) <= 4e-16 * abs(level):
                return (level, loads) if abs(short) <= 1e-12 * abs(batch) else None
            level = step
    except ODD:
        pass
    return None


def _bracket(
    rate: Numbers, offset: Numbers, low: Numbers, high: Numbers, left: float, right: float
) -> tuple[float, float]:
    """Levels at which nobody, and everybody, is at its limit; kept where a tighter bracket is known."""
    workers = [
        (r, o, least, most) for r, o, least, most in zip(rate, offset, low, high, strict=True) if r > 0
    ]
    start = min([(o + least) / r for r, o, least, _ in workers], default=math.inf)
    end = max([(o + most) / r for r, o, _, most in workers], default=-math.inf)
    return max(left, math.nextafter(start, -math.inf)), min(right, math.nextafter(end, math.inf))


def whole(slope: Numbers, overhead: Numbers, batch: int, low: Numbers, high: Numbers) -> list[int] | None:
    """Whole samples that end soonest; see ``whole_samples``."""
    total_ = float(batch)
    try:
        least = [float(math.ceil(one)) for one in low]
        most = [min(float(math.floor(one)), total_) for one in high]
        if total(least) > batch or (found := fill(slope, overhead, total_, least, most)) is None:
            return None
        level = min(max(found[0] * (1 - 1e-12), 0.0), sys.float_info.max)
        loads = [
            _count(per_sample, late, level, fewest, largest)
            for per_sample, late, fewest, largest in zip(slope, overhead, least, most, strict=True)
        ]
        left = total_ - total(loads)
        if not 0 <= left <= FEW_LEFT:
            return None
        if left:
            _give(slope, overhead, int(left), loads, most)
    except ODD:
        return None
    return [int(load) for load in loads]


def _count(slope: float, overhead: float, level: float, low: float, high: float) -> float:
    """Whole samples that a worker ends by ``level``; what counts is the cost as the cost itself computes it."""
    load = (level - overhead) / (slope if slope > QUICKEST else QUICKEST)
    load = float(math.floor(load)) if load > 0 else 0.0
    load = low if load < low else high if load > high else load
    if load < high and overhead + slope * (load + 1) <= level:
        load += 1
    if load > low and _seconds(slope, overhead, load) > level:
        load -= 1
    return load


def _give(slope: Numbers, overhead: Numbers, left: int, loads: Numbers, high: Numbers) -> None:
    """``left`` more samples, each to whoever then ends soonest; the lowest rank wins a tie."""

    def next_end(worker: int) -> float:
        if not loads[worker] < high[worker]:
            return math.inf
        return min(_seconds(slope[worker], overhead[worker], loads[worker] + 1), sys.float_info.max)

    ends = [next_end(worker) for worker in range(len(loads))]
    for _ in range(left):
        chosen = ends.index(min(ends))
        loads[chosen] += 1
        ends[chosen] = next_end(chosen)


def _seconds(slope: float, overhead: float, load: float) -> float:
    return overhead + (slope * load if load > 0 else 0.0)
