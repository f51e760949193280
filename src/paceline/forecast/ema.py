"""``ema``: exponential moving average, of speed (LB-BSP's section 5.4) or of seconds per sample."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np

from paceline.errors import PacelineError
from paceline.forecast.protocol import Forecast, Reading, seen, smoothed
from paceline.rounds import Array


class EmaState(NamedTuple):
    mean: Array  # of samples/s or of seconds/sample; NaN before a worker's first reading


@dataclass(frozen=True, slots=True)
class Ema(Forecast[EmaState]):
    """s <- gain v + (1 - gain) s (LB-BSP, Table 3 (EMA)).

    gain: weight of the newest reading, in (0, 1]; the paper's is 0.2.
    of: "speed" averages samples/s as the paper does; "seconds" averages seconds per sample, so that the
        prediction is a harmonic mean of speeds: unbiased for the time that a load takes.
    """

    gain: float = 0.2
    of: Literal["speed", "seconds"] = "speed"

    def __post_init__(self) -> None:
        check_gain("ema", self.gain)
        if self.of not in ("speed", "seconds"):
            raise PacelineError(f"forecast 'ema': of={self.of}: expected speed or seconds")

    def init(self, shape: tuple[int, ...]) -> EmaState:
        return EmaState(np.full(shape, np.nan))

    def step(self, state: EmaState, reading: Reading) -> tuple[Array, EmaState]:
        here = seen(reading.speed)
        speed = np.where(here, reading.speed, 1.0)
        if self.of == "speed":
            mean = smoothed(state.mean, speed, self.gain, here)
            return mean, EmaState(mean)
        mean = smoothed(state.mean, 1 / speed, self.gain, here)
        return 1 / mean, EmaState(mean)


def check_gain(name: str, gain: float) -> None:
    if not 0 < gain <= 1:
        raise PacelineError(f"forecast {name!r}: gain={gain:g}: expected 0 < gain <= 1")
