"""Makes a worker slow on purpose, by sleeping: exact, and it costs no CPU, so many workers fit on few cores."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

import numpy as np

from paceline.data import traces
from paceline.rounds import Array
from paceline.torch import peers
from paceline.train.config import TrainConfig

SLOWEST_BASE = 1e-3  # seconds per sample of pace 1, at least: small models would drown in scheduling noise
CALIBRATIONS = 5


class Pacer(Protocol):
    """Sleeps for a micro-batch of ``samples`` in round ``step``; ``first`` in its round."""

    def sleep(self, step: int, samples: int, first: bool) -> None: ...


class NoPacer:
    """The machine's own unevenness counts."""

    def sleep(self, step: int, samples: int, first: bool) -> None:
        pass


class SteadyPacer:
    """The same seconds for each sample in every round."""

    def __init__(self, seconds_per_sample: float) -> None:
        self._seconds = seconds_per_sample

    def sleep(self, step: int, samples: int, first: bool) -> None:
        time.sleep(self._seconds * samples)


class TracePacer:
    """Recorded seconds per sample and overhead: one row a round, each of shape (T,)."""

    def __init__(self, seconds_per_sample: Array, overhead: Array) -> None:
        self._seconds, self._overhead = seconds_per_sample, overhead

    def sleep(self, step: int, samples: int, first: bool) -> None:
        time.sleep(self._seconds[step] * samples + (self._overhead[step] if first else 0.0))


def create(config: TrainConfig, rank: int, compute: Callable[[int], None]) -> Pacer:
    """The pacer that the configuration asks for. Collective.

    compute: runs the model forward and backward on that many samples, without the other ranks; with ``--pace``
        it is timed on all ranks at once, so that pace 1 is what the slowest of them reaches without sleeping.
    """
    if config.pace_trace is not None:
        trace = traces.read(config.pace_trace)
        return TracePacer(trace.seconds_per_sample[:, rank], trace.overhead[:, rank])
    if config.pace_ms is not None:
        return SteadyPacer(config.pace_ms[rank] / 1e3)
    if config.pace is not None:
        own = _seconds_per_sample(compute, max(1, config.global_batch // config.workers))
        base = max(SLOWEST_BASE, *peers.gather(own))
        return SteadyPacer(max(0.0, config.pace[rank] * base - own))
    return NoPacer()


def _seconds_per_sample(compute: Callable[[int], None], samples: int) -> float:
    compute(samples)
    took = []
    for _ in range(CALIBRATIONS):
        began = time.perf_counter()
        compute(samples)
        took.append(time.perf_counter() - began)
    return float(np.median(took)) / samples
