"""Makes workers slow on purpose, by sleeping: exact, and it costs no CPU, so many workers fit on few cores."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from paceline.data import traces
from paceline.rounds import Array
from paceline.train.config import TrainConfig

QUICKEST = 1e-3  # seconds per sample of factor 1, at least: small models would drown in scheduling noise
CALIBRATIONS = 5


@dataclass(frozen=True)
class Slowdown:
    """Seconds that workers sleep. Both arrays have a row for each round, the last of which stays, and a column for
    each worker. It can be called as a ``ray.worker.Delay``.

    seconds_per_sample, overhead: shape (rounds, workers); the overhead is slept once in a round.
    """

    seconds_per_sample: Array
    overhead: Array

    def __call__(self, worker: int, step: int, samples: int, first: bool = True) -> float:
        """Seconds for a (micro-)batch of ``samples`` in round ``step``; ``first`` in its round."""
        row = min(step, len(self.overhead) - 1)
        late = self.overhead[row, worker] if first else 0.0
        return float(self.seconds_per_sample[row, worker] * samples + late)


def create(config: TrainConfig, unslowed: Callable[[], list[float]]) -> Slowdown | None:
    """The slowdown that the configuration asks for; None if the machine's own unevenness counts.

    unslowed: called with ``--slowdown`` only; tells seconds per sample of each worker without any sleep. Factor 1 is
        what the slowest of them reaches.
    """
    if config.slowdown_trace is not None:
        trace = traces.read(config.slowdown_trace)
        return Slowdown(trace.seconds_per_sample, trace.overhead)
    if config.slowdown_ms is not None:
        return _steady(np.array(config.slowdown_ms) / 1e3)
    if config.slowdown is not None:
        own = np.array(unslowed())
        return _steady(np.maximum(np.array(config.slowdown) * max(QUICKEST, *own) - own, 0.0))
    return None


def seconds_per_sample(compute: Callable[[int], object], samples: int) -> float:
    """The median of what ``compute`` takes for this many samples, after a first time that is not counted."""
    compute(samples)
    took = []
    for _ in range(CALIBRATIONS):
        began = time.perf_counter()
        compute(samples)
        took.append(time.perf_counter() - began)
    return float(np.median(took)) / samples


def _steady(seconds: Array) -> Slowdown:
    return Slowdown(seconds[None], np.zeros((1, len(seconds))))
