"""``tracking``: averages while a worker's pace rests, follows at once when it changes: ``level``'s forecast."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from paceline.forecast import kalman
from paceline.forecast.kalman import Track
from paceline.forecast.protocol import Reading, seen
from paceline.rounds import Array


@dataclass(frozen=True, slots=True)
class Tracking:
    """A Kalman filter of the logarithm of seconds per sample that learns its own settings."""

    needs_readings: ClassVar[bool] = False
    trains: ClassVar[bool] = False

    def init(self, shape: tuple[int, ...]) -> Track:
        return kalman.start(shape)

    def step(self, state: Track, reading: Reading) -> tuple[Array, Track]:
        speed = np.where(seen(reading.speed), reading.speed, np.nan)
        expected, _, state = kalman.follow(state, 1 / speed)
        return 1 / expected, state
