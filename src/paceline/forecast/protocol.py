"""The inputs, the outputs and the protocol of forecasts.

Between two rounds a forecast gets each worker's speed in the last round, and the part of its machine that it can
have in the next one; it predicts each worker's speed in the next round. It is a frozen configuration; what it learns
is in a state, an array or a tuple of arrays, that the caller keeps. It reads no clock and uses no randomness except
from a seed: the same state and reading give the same prediction.
"""

from __future__ import annotations

from typing import Any, ClassVar, NamedTuple, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from paceline.rounds import Array

S = TypeVar("S")


class Reading(NamedTuple):
    """Measurements between round k-1 and round k; all of shape (..., n).

    Attributes:
        speed: v^{k-1}, samples/s in the last round; NaN (or not positive) if a worker was absent.
        cpu: c^k, the newest reading, taken before the next round starts: the portion in [0, 1] of its machine's
            processors that the worker can have (1 less what others use); NaN if unknown, None if not read.
        memory: m^k, the same for memory.
    """

    speed: Array
    cpu: Array | None = None
    memory: Array | None = None


class Forecast(Protocol[S]):
    """Predicts every worker's speed in the next round.

    Attributes:
        needs_readings: Whether it reads ``Reading.cpu`` and ``Reading.memory``.
        trains: Whether ``train`` does something, which takes long.
    """

    needs_readings: ClassVar[bool] = False
    trains: ClassVar[bool] = False

    def init(self, shape: tuple[int, ...]) -> S:
        """Begin a run.

        Args:
            shape: Shape of the readings, (..., n).

        Returns:
            The state before the first round.
        """
        ...

    def step(self, state: S, reading: Reading) -> tuple[Array, S]:
        """Predict the next round. No argument is changed.

        Args:
            state: As the step before returned it.
            reading: Measurements of the newest round.

        Returns:
            Predicted samples/s, shape (..., n), positive, and NaN only for a worker that has never been seen; and the
            next state.
        """
        ...

    def train(self, state: S) -> S:
        """Do the training that is due between two rounds.

        Engines call it once after each ``step``, in a background thread while the next round runs, and give its
        result to the next ``step``.

        Args:
            state: As the newest step returned it; it is not changed.

        Returns:
            The state after training.
        """
        return state


AnyForecast = Forecast[Any]
"""A forecast with any kind of state."""


def seen(speed: Array) -> NDArray[np.bool_]:
    """Which workers reported a usable speed: finite and positive."""
    return np.isfinite(speed) & (speed > 0)


def smoothed(mean: Array, value: Array, gain: float, here: NDArray[np.bool_]) -> Array:
    """mean + gain (value - mean) for workers in ``here``, the old mean for others; the value while mean is NaN."""
    with np.errstate(invalid="ignore"):
        moved = np.where(np.isnan(mean), value, mean + gain * (value - mean))
    return np.where(here, moved, mean)
