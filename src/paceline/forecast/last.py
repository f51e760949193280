"""``last``: the coming round will be as the last one ("memoryless" in LB-BSP's Table 3)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from paceline.forecast.protocol import Forecast, Reading, seen
from paceline.rounds import Array


class LastState(NamedTuple):
    speed: Array  # newest speed seen of each worker, samples/s; NaN before the first


@dataclass(frozen=True, slots=True)
class Last(Forecast[LastState]):
    """v^{k-1}: quick to follow a change, and misled by every spike (LB-BSP, Table 3 (memoryless))."""

    def init(self, shape: tuple[int, ...]) -> LastState:
        return LastState(np.full(shape, np.nan))

    def step(self, state: LastState, reading: Reading) -> tuple[Array, LastState]:
        speed = np.where(seen(reading.speed), reading.speed, state.speed)
        return speed, LastState(speed)
