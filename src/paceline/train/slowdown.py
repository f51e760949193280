"""Slows workers down on purpose, by sleeping. This is exact and takes no CPU, so many workers fit on few cores."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from paceline.data import traces
from paceline.rounds import Array
from paceline.runs.words import listing
from paceline.train.config import TrainConfig

QUICKEST = 1e-3  # least seconds a sample of factor 1; with less, the factors would drown in scheduling noise
CALIBRATIONS = 5


@dataclass(frozen=True)
class Slowdown:
    """The seconds that workers sleep. An instance can be called as a ``ray.worker.Delay``.

    seconds_per_sample, overhead: shape (rounds, workers); the last row also holds for all later rounds. The overhead
        is slept once per round.
    words: a sentence on the speeds that are played, for people; empty if the options say it themselves.
    """

    seconds_per_sample: Array
    overhead: Array
    words: str = ""

    def __call__(self, worker: int, step: int, samples: int, first: bool = True) -> float:
        """Seconds for a (micro-)batch of ``samples`` in round ``step``. first: whether it is the round's first."""
        row = min(step, len(self.overhead) - 1)
        late = self.overhead[row, worker] if first else 0.0
        return float(self.seconds_per_sample[row, worker] * samples + late)


def create(config: TrainConfig, unslowed: Callable[[], list[float]]) -> Slowdown | None:
    """The slowdown of the configuration; None if it has none.

    unslowed: returns seconds per sample of each worker without any sleep; called only with ``--slowdown``. Factor 1
        is ``QUICKEST``, or the slowest worker's own time if that is longer: every worker sleeps for the rest.
    """
    if config.slowdown_trace is not None:
        trace = traces.read(config.slowdown_trace)
        return Slowdown(trace.seconds_per_sample, trace.overhead)
    if config.slowdown_ms is not None:
        return Slowdown(*_steady(np.array(config.slowdown_ms) / 1e3))
    if config.slowdown is not None:
        own = np.array(unslowed())
        played = np.array(config.slowdown) * max(QUICKEST, *own)
        each = listing([f"{1e3 * seconds:.3g}" for seconds in played])
        words = f"Workers sleep, so that computing a sample takes them {each} ms."
        return Slowdown(*_steady(np.maximum(played - own, 0.0)), words)
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


def _steady(seconds: Array) -> tuple[Array, Array]:
    return seconds[None], np.zeros((1, len(seconds)))
