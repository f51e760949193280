"""What a forecast is given, and what it gives.

Between two rounds a forecast reads how fast each worker just was, and what its machine has to offer for
the round about to begin; it answers how fast each will be. It is a frozen configuration; what it learns
lives in a state, an array or a tuple of them, that the caller keeps. No clock, and no randomness but a seed: the
same state and reading give the same prediction.
"""

from __future__ import annotations

from typing import Any, ClassVar, NamedTuple, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from paceline.rounds import Array

S = TypeVar("S")


class Reading(NamedTuple):
    """What is known between round k-1 and round k; all of shape (..., n), the last axis being the worker.

    speed: v^{k-1}, samples/s in the round just finished; NaN (or nothing positive) where a worker was absent.
    cpu: c^k, the newest reading, so that of the coming round's start: the portion in [0, 1] of its machine's
        processors that the worker can have (1 less what others use); NaN if unknown, None if not read.
    memory: m^k, likewise for memory.
    """

    speed: Array
    cpu: Array | None = None
    memory: Array | None = None


class Forecast(Protocol[S]):
    """Predicts every worker's speed in the next round."""

    needs_readings: ClassVar[bool] = False  # reads Reading.cpu and memory
    # Fits a model as it goes: engines step it beside the training, not in its way.
    trains: ClassVar[bool] = False

    def init(self, shape: tuple[int, ...]) -> S:
        """The state before the first round; shape is (..., n)."""
        ...

    def step(self, state: S, reading: Reading) -> tuple[Array, S]:
        """Predicted samples/s for the next round, shape (..., n), and the new state.

        A prediction is positive, and NaN only for a worker that has never been seen. No argument is changed.
        """
        ...


AnyForecast = Forecast[Any]
"""A forecast whose state is of no interest."""


def seen(speed: Array) -> NDArray[np.bool_]:
    """Who reported a usable speed: finite and positive."""
    return np.isfinite(speed) & (speed > 0)


def smoothed(mean: Array, value: Array, gain: float, here: NDArray[np.bool_]) -> Array:
    """mean + gain (value - mean) where here; the first value as it is where mean is still NaN."""
    with np.errstate(invalid="ignore"):
        moved = np.where(np.isnan(mean), value, mean + gain * (value - mean))
    return np.where(here, moved, mean)
