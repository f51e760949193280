"""Slows workers down on purpose, by sleeping. This is exact and takes no CPU, so many workers fit on few cores."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from paceline.data import traces
from paceline.rounds import Array
from paceline.train.config import TrainConfig

QUICKEST = 1e-3  # least seconds per sample of factor 1; smaller ones would drown in scheduling noise
CALIBRATIONS = 5


@dataclass(frozen=True)
class Slowdown:
    """The seconds that workers sleep. An instance can be called as a ``ray.worker.Delay``.

    seconds_per_sample, overhead: shape (rounds, workers); the last row also holds for all later rounds. The overhead
        is slept once per round.
    """

    seconds_per_sample: Array
    overhead: Array

    def __call__(self, worker: int, step: int, samples: int, first: bool = True) -> float:
        """Seconds for a (micro-)batch of ``samples`` in round ``step``. first: whether it is the round's first."""
        row = min(step, len(self.overhead) - 1)
        late = self.overhead[row, worker] if first else 0.0
        return float(self.seconds_per_sample[row, worker] * samples + late)


def create(config: TrainConfig, unslowed: Callable[[], list[float]]) -> Slowdown | None:
    """The slowdown of the configuration; None if it has none.

    unslowed: returns seconds per sample of each worker without any sleep; called only with ``--slowdown``. Factor 1
        is the time of the slowest worker.
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
    """The median time of ``compute`` per sample, for this many samples; the first call is not measured."""
    compute(samples)
    took = []
    for _ in range(CALIBRATIONS):
        began = time.perf_counter()
        compute(samples)
        took.append(time.perf_counter() - began)
    return float(np.median(took)) / samples


def _steady(seconds: Array) -> Slowdown:
    return Slowdown(seconds[None], np.zeros((1, len(seconds))))
