"""From the workers' gradients to one step: weighted by samples, with the statistics that policies ask for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Vector = NDArray[np.float32] | NDArray[np.float64]


class Part(NamedTuple):
    """One worker's gradient: the mean over its samples, of their loss and of the loss's gradient."""

    gradient: Vector
    loss: float
    samples: int
    weight: float = 1.0


class Aggregate(NamedTuple):
    """step: what the parameters move by, times minus the learning rate.

    loss: mean over the samples. norm2: squared norm of the mean gradient. variance: unbiased estimate of the
    summed variance of one gradient over an average number of samples; NaN from a single gradient.
    """

    step: Vector
    loss: float
    samples: int
    norm2: float
    variance: float


def aggregate(parts: Sequence[Part], batch: float | None = None, statistics: bool = True) -> Aggregate:
    """The parts' mean, each sample weighing its part's weight: LB-BSP's weighted aggregation.

    batch: divide the weighted sum by this many samples instead of by the weighted samples that it has.
    statistics: without them the variance is NaN, and half of the reading of a large model is saved.
    Parts are added in the order given, so give them in one that does not depend on their arrival.
    """
    weights = np.array([part.samples * part.weight for part in parts])
    kind = parts[0].gradient.dtype.type
    if np.all(weights == weights[0]):  # no multiplication for each
        total = parts[0].gradient.copy()
        for part in parts[1:]:
            total += part.gradient
        total *= kind(weights[0])
    else:
        total = parts[0].gradient * kind(weights[0])
        for part, weight in zip(parts[1:], weights[1:], strict=True):
            total += part.gradient * kind(weight)
    scale = kind(weights.sum())
    mean = total / scale if batch is not None else np.divide(total, scale, out=total)
    samples = np.array([part.samples for part in parts])
    variance = np.nan
    if statistics and len(parts) > 1:
        spread = sum(part.samples * _norm2(part.gradient - mean) for part in parts)
        variance = spread / (len(parts) - 1) * len(parts) / samples.sum()
    loss = float(np.average([part.loss for part in parts], weights=samples))
    step = mean if batch is None else total / kind(batch)
    return Aggregate(step, loss, int(samples.sum()), _norm2(mean), float(variance))


class Parameters:
    """A parameter vector under SGD with momentum, as torch.optim.SGD has it."""

    def __init__(self, values: Vector, momentum: float = 0.0) -> None:
        self.values, self.momentum, self.version = values, momentum, 0
        self.velocity: Vector | None = None

    def move(self, step: Vector, rate: float) -> None:
        """One update. ``values`` becomes a new array, so that who still reads the old one is not disturbed."""
        if self.momentum:
            kind = step.dtype.type(self.momentum)
            self.velocity = step.copy() if self.velocity is None else kind * self.velocity + step
            step = self.velocity
        moved = step * self.values.dtype.type(rate)
        self.values = np.subtract(self.values, moved, out=moved)
        self.version += 1

    def state_dict(self) -> dict[str, Any]:
        """Everything needed to go on."""
        return {"values": self.values, "velocity": self.velocity, "version": self.version}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there."""
        self.values, self.velocity, self.version = state["values"], state["velocity"], state["version"]


def _norm2(vector: Vector) -> float:
    return float(np.dot(vector, vector))
