"""``narx``: speed from past speeds and from processors and memory, now and before (LB-BSP's section 3.2.1)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from paceline.errors import PacelineError
from paceline.forecast.learned import CPU, MEMORY_USE, SPEED, Learned
from paceline.forecast.networks import Perceptron


@dataclass(frozen=True, slots=True)
class Narx(Learned):
    """v^k = F(v^{k-1}, v^{k-2}; c^k, c^{k-1}[, c^{k-2}]; m^k, m^{k-1}[, m^{k-2}]), one hidden layer of tanh.

    inputs: 8 is eq. (4) as printed, with d = 2; "less than 20 parameters" then allows one hidden unit (11).
        6 reads the window of two as the current reading and one before: two hidden units (17).
    hidden: hidden units; 0 takes the number above. LB-BSP, eq. (4).
    """

    inputs: Literal[6, 8] = 6
    hidden: int = 0
    needs_readings: ClassVar[bool] = True
    name: ClassVar[str] = "narx"

    def __post_init__(self) -> None:
        Learned.__post_init__(self)
        if self.inputs not in (6, 8):
            raise PacelineError(f"forecast 'narx': inputs={self.inputs}: expected 6 or 8")
        if self.hidden < 0:
            raise PacelineError(
                f"forecast 'narx': hidden={self.hidden}: expected 0 (the paper's size) or more"
            )

    @property
    def network(self) -> Perceptron:
        return Perceptron(self.inputs, self.hidden or (1 if self.inputs == 8 else 2))

    @property
    def lags(self) -> list[tuple[int, int]]:
        readings = range(3 if self.inputs == 8 else 2)
        return [(1, SPEED), (2, SPEED)] + [
            (lag, channel) for channel in (CPU, MEMORY_USE) for lag in readings
        ]
