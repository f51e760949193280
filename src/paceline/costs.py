"""Seconds as a function of load: what a worker's round costs.

A cost answers two questions for all workers at once, in arrays of shape (..., n): how long does each take
for a load, and how much can each do within a time. The second is the generalised inverse of the first, so a cost
may be flat in places and may jump, but must never fall.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from paceline.errors import PacelineError, short

__all__ = ["Array", "Cost", "Increasing", "Linear", "Only", "Saturating", "derivative", "line_through"]

Array = NDArray[np.float64]
"""Numbers of shape (..., n): the last axis is the worker, the leading axes are realizations."""

RESOLUTION = 1e-9  # part of a round's seconds below which growth with the load is taken for noise
DIFFERENCE = 1e-5  # of a load, to each side: the difference quotient in place of an unknown derivative
# The numbers that are accepted as seconds: from what a clock can measure to what a person could wait for. A float
# also holds numbers outside of this range, but their sums and quotients overflow to infinities, and every figure
# computed from them would be wrong without an error. So they are refused at the input.
LEAST, MOST = 1e-12, 1e9  # seconds; the larger one is 30 years
SPAN = "1e-12 to 1e9"  # in words, for durations that must be more than 0
SPAN_0 = "0 to 1e9"  # for those that may be 0
# Seconds per sample are cut to these, so that a worker that reported 0 seconds is not infinitely fast.
QUICKEST, LONGEST = 1e-15, 1e15


def outside(seconds: Any, least: float = LEAST) -> NDArray[np.bool_]:
    """Whether each number lies outside of ``least`` to ``MOST``, or is NaN. least: 0 for durations that may be 0."""
    values = np.asarray(seconds, float)
    wrong: NDArray[np.bool_] = ~((values >= least) & (values <= MOST))
    return wrong


def numbers(name: str, value: Any, expected: str, least: float | None = None) -> Array:
    """An argument as float64. Raises PacelineError if it is no number or array of numbers, or one is below least."""
    with suppress(TypeError, ValueError):
        if least is None or np.all(np.asarray(value, float) >= least):
            return np.asarray(value, float)
    raise PacelineError(f"{name}={short(value)}: expected {expected}")


class Cost(Protocol):
    """Non-decreasing seconds of a load in samples, for each worker."""

    def seconds(self, load: Array) -> Array:
        """Seconds that each worker takes for its load.

        Args:
            load: Samples, 0 or more; broadcasts to (..., n).

        Returns:
            Shape (..., n); infinite for an impossible load.
        """
        ...

    def load_at(self, seconds: Array) -> Array:
        """The largest load that each worker completes within a time.

        Args:
            seconds: Seconds, 0 or more; broadcasts to (..., n), as a level of shape (..., 1) does.

        Returns:
            Samples, shape (..., n); 0 if every load takes longer, and the largest float if none does and there is no
            ``most``.
        """
        ...


@dataclass(frozen=True, slots=True)
class Linear:
    """overhead + seconds_per_sample * load; both (..., n). An infinite slope is a worker that is gone.

    Args:
        seconds_per_sample: Shape (..., n).
        overhead: Seconds at load 0, shape (..., n).
    """

    seconds_per_sample: Array
    overhead: Array

    def seconds(self, load: Array) -> Array:
        # Without load the overhead alone, also if the slope is infinite.
        return self.overhead + np.where(load > 0, self.seconds_per_sample, 0.0) * load

    def load_at(self, seconds: Array) -> Array:
        return np.maximum(_reach(self.seconds_per_sample, seconds - self.overhead), 0.0)


@dataclass(frozen=True, slots=True)
class Saturating:
    """A GPU's cost (LB-BSP, eq. (5)): flat up to ``knee`` samples, linear up to ``most``, then impossible.

    Args:
        seconds_per_sample: The slope, shape (..., n).
        overhead: Seconds in addition, shape (..., n).
        knee: x^s, samples below which a load takes no less time, shape (..., n).
        most: x^o, samples above which memory runs out, shape (..., n); at least ``knee``.
    """

    seconds_per_sample: Array
    overhead: Array
    knee: Array
    most: Array

    def seconds(self, load: Array) -> Array:
        line = self.overhead + self.seconds_per_sample * np.maximum(load, self.knee)
        return np.where(load <= self.most, line, np.inf)

    def load_at(self, seconds: Array) -> Array:
        load = np.minimum(_reach(self.seconds_per_sample, seconds - self.overhead), self.most)
        flat = self.overhead + self.seconds_per_sample * self.knee
        # At exactly the flat level a load up to the knee fits, even if the division above rounded down.
        return np.where(seconds >= flat, np.maximum(load, self.knee), 0.0)


def _reach(slope: Array, spare: Array) -> Array:
    """The load that takes ``spare`` seconds at this slope, negative if spare is; any load for a slope of 0."""
    with np.errstate(over="ignore"):  # any load at all, for a level beyond all seconds
        load: Array = spare / np.maximum(slope, QUICKEST)
    if np.all(slope > 0):
        return load
    return np.where((slope <= 0) & (spare >= 0), np.finfo(float).max, load)


@dataclass(frozen=True, slots=True)
class Increasing:
    """Any non-decreasing function of load, inverted by bisection on [0, most] down to neighbouring floats.

    Attributes:
        function: Loads (..., n) -> seconds (..., n).
        most: The largest load that ``load_at`` returns, (..., n).
    """

    function: Callable[[Array], Array]
    most: Array

    def seconds(self, load: Array) -> Array:
        return self.function(load)

    def load_at(self, seconds: Array) -> Array:
        high = np.array(np.broadcast_arrays(np.asarray(self.most, float), seconds)[0])
        low = np.where(self.function(high) <= seconds, high, 0.0)
        while np.any((middle := halfway(low, high)) > low):
            fits = self.function(middle) <= seconds
            low, high = np.where(fits, middle, low), np.where(fits, high, middle)
        return low


@dataclass(frozen=True, slots=True)
class Only:
    """Another cost with only some of its workers present; for the others, any load is impossible.

    Args:
        cost: The cost of all workers.
        present: Which workers take part, booleans of shape (..., n).
    """

    cost: Cost
    present: NDArray[np.bool_]

    def seconds(self, load: Array) -> Array:
        return np.where(self.present | (load <= 0), self.cost.seconds(load), np.inf)

    def load_at(self, seconds: Array) -> Array:
        return np.where(self.present, self.cost.load_at(seconds), 0.0)


def derivative(cost: Cost, load: Array) -> Array:
    """The seconds that one more sample would add for each worker: a subgradient of its cost.

    At the knee of a ``Saturating`` cost it is the slope above it. Other costs than this module's lines are
    differentiated numerically.

    Args:
        cost: Any cost.
        load: Samples, shape (..., n).

    Returns:
        Seconds per sample, shape (..., n).
    """
    if isinstance(cost, Only):
        return derivative(cost.cost, load)
    if isinstance(cost, Linear):
        return np.array(np.broadcast_to(cost.seconds_per_sample, np.shape(load)))
    if isinstance(cost, Saturating):
        return np.where(load >= cost.knee, cost.seconds_per_sample, 0.0)
    side = DIFFERENCE * np.maximum(load, 1.0)
    low, high = np.maximum(load - side, 0.0), load + side
    high = np.where(np.isfinite(cost.seconds(high)), high, load)  # the load is the largest possible one
    return (cost.seconds(high) - cost.seconds(low)) / (high - low)


def halfway(low: Array, high: Array) -> Array:
    """A float between two; equal to ``low`` if they are neighbours.

    It halves the number of floats between them rather than their distance, so that a bisection from 0 or to
    infinity takes 64 steps at most.
    """

    def counted(value: Array) -> NDArray[np.int64]:
        bits = np.ascontiguousarray(value, dtype=float).view(np.int64)
        return np.where(bits < 0, -(bits & np.int64(2**63 - 1)), bits)

    first, last = counted(low), counted(high)
    count = first // 2 + last // 2 + (first & last & 1)
    size = np.ascontiguousarray(np.abs(count)).view(np.float64)
    return np.where(count < 0, -size, size)


def line_through(loads: Array, seconds: Array, overhead: Array, otherwise: Array | float) -> Array:
    """Slopes of the lines through (0, overhead) and (loads, seconds).

    Args:
        loads: Samples, shape (..., n).
        seconds: Measured seconds, shape (..., n); NaN if nothing was measured.
        overhead: Seconds at load 0, shape (..., n).
        otherwise: The result without a measurement: no load, NaN seconds, or hardly anything beyond the overhead, as
            with a vanishing load, whose slope would be rounding or noise.

    Returns:
        Seconds per sample, shape (..., n).
    """
    beyond = seconds - overhead
    measured = (loads > 0) & (beyond > RESOLUTION * seconds)
    if measured.all():
        beyond /= loads
        return beyond
    slope = np.array(np.broadcast_to(otherwise, loads.shape))
    return np.divide(beyond, loads, out=slope, where=measured)
