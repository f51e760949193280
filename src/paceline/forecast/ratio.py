"""``ratio``: speed in proportion to the processors a worker can have; nothing to train."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import numpy as np

from paceline.forecast.ema import check_gain
from paceline.forecast.protocol import Forecast, Reading, seen, smoothed
from paceline.rounds import Array

LEAST_CPU = 0.05  # a reading below it says more about the meter than about the worker


class RatioState(NamedTuple):
    """What is kept of each worker: mean speed per unit of processor, mean speed, the newest processor reading."""

    per_cpu: Array
    speed: Array
    cpu: Array  # c^k: the reading that goes with the speed still to come


@dataclass(frozen=True, slots=True)
class Ratio(Forecast[RatioState]):
    """c^k x EMA(v/c): follows a change of the processors' share at once, and smooths the rest.

    gain: weight of the newest v/c, in (0, 1]. A worker without readings gets EMA(v).
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
        # the very first round has no reading of its own start: the one at its end stands in
        used = np.where(np.isnan(state.cpu), cpu, state.cpu)
        rate = speed / used
        per_cpu = smoothed(state.per_cpu, rate, self.gain, here & np.isfinite(rate))
        predicted = cpu * per_cpu
        return np.where(np.isfinite(predicted), predicted, mean), RatioState(per_cpu, mean, cpu)
