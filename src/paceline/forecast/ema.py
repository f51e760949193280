"""Forecasts without training: the newest speed (``last``), a moving average (``ema``), and ``ratio``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple

import numpy as np

from paceline.errors import choice, number
from paceline.forecast.protocol import Forecast, Reading, seen, smoothed
from paceline.rounds import Array

LEAST_CPU = 0.05  # lower readings count as this, since they are mostly errors of measurement


@dataclass(frozen=True, slots=True)
class Last(Forecast[Array]):
    """Predicts the last round's speed, v^{k-1}: it follows a change at once, and is misled by every spike.

    LB-BSP, Table 3 (memoryless).
    """

    def init(self, shape: tuple[int, ...]) -> Array:
        return np.full(shape, np.nan)

    def step(self, state: Array, reading: Reading) -> tuple[Array, Array]:
        speed = np.where(seen(reading.speed), reading.speed, state)
        return speed, speed


@dataclass(frozen=True, slots=True)
class Ema(Forecast[Array]):
    """Exponential moving average: s <- gain v + (1 - gain) s (LB-BSP, Table 3 (EMA)).

    Args:
        gain: Weight of the newest reading, in (0, 1]; the paper's is 0.2.
        of: "speed" averages samples/s as the paper does; "seconds" averages seconds per sample, so that the
            prediction is a harmonic mean of speeds: unbiased for the time that a load takes. This average is the
            state, NaN before a worker's first reading.
    """

    gain: float = 0.2
    of: Literal["speed", "seconds"] = "speed"

    def __post_init__(self) -> None:
        check_gain("ema", self.gain)
        choice("forecast 'ema': of", self.of, "speed", "seconds")

    def init(self, shape: tuple[int, ...]) -> Array:
        return np.full(shape, np.nan)

    def step(self, state: Array, reading: Reading) -> tuple[Array, Array]:
        here = seen(reading.speed)
        speed = np.where(here, reading.speed, 1.0)
        mean = smoothed(state, speed if self.of == "speed" else 1 / speed, self.gain, here)
        return mean if self.of == "speed" else 1 / mean, mean


class RatioState(NamedTuple):
    """Averages and the newest reading of each worker, (..., n)."""

    per_cpu: Array  # mean speed per unit of processor
    speed: Array  # mean speed
    cpu: Array  # c^k: the processor reading for the next round


@dataclass(frozen=True, slots=True)
class Ratio(Forecast[RatioState]):
    """Predicts speed in proportion to the processors that a worker can have, c^k x EMA(v/c): it follows a change of
    these at once, and smooths the rest.

    Args:
        gain: Weight of the newest v/c, in (0, 1]. For a worker without readings it predicts EMA(v).
    """

    gain: float = 0.2
    needs_readings: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_gain("ratio", self.gain)

    def init(self, shape: tuple[int, ...]) -> RatioState:
        blank = np.full(shape, np.nan)
        return RatioState(blank, blank, blank)

    def step(self, state: RatioState, reading: Reading) -> tuple[Array, RatioState]:
        here = seen(reading.speed)
        speed = np.where(here, reading.speed, np.nan)
        mean = smoothed(state.speed, speed, self.gain, here)
        cpu = state.cpu if reading.cpu is None else np.maximum(reading.cpu, LEAST_CPU)
        # The first round has no reading at its start: the one at its end takes its place.
        used = np.where(np.isnan(state.cpu), cpu, state.cpu)
        rate = speed / used
        per_cpu = smoothed(state.per_cpu, rate, self.gain, here & np.isfinite(rate))
        predicted = cpu * per_cpu
        return np.where(np.isfinite(predicted), predicted, mean), RatioState(per_cpu, mean, cpu)


def check_gain(name: str, gain: float) -> None:
    number(f"forecast {name!r}: gain", gain, "0 < gain <= 1", lambda gain: 0 < gain <= 1)
