"""Round-trip times of single workers on the event-driven clock, drawn from a scenario's timing models."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import count
from typing import NamedTuple

import numpy as np

from paceline import costs
from paceline.errors import PacelineError
from paceline.rounds import Array
from paceline.simulate.timing import Constant, TimingModel


class Change(NamedTuple):
    """From ``at`` seconds on these workers' round trips take ``factor`` times as long."""

    at: float
    workers: tuple[int, ...]
    factor: float


class RoundTrips:
    """Seconds of each worker's j-th task: overhead plus load times seconds a sample, each from its own timing model.

    What a worker's j-th task takes depends on the seed, the worker and j only: policies that order the tasks
    differently meet the same cluster.

    changes: slower or faster from given times on. noise: further spread of each task's pace, the standard deviation
    of its logarithm. knee: samples below which a task takes as long as with that many. transfer: seconds that each
    worker's link takes for its j-th task, by j. noise and knee: one for all, or of shape (n,).
    """

    def __init__(
        self,
        workers: int,
        overhead: TimingModel,
        seconds_per_sample: TimingModel | None = None,
        seed: int = 0,
        changes: Sequence[Change] = (),
        noise: Array | float = 0.0,
        knee: Array | float = 0.0,
        transfer: Callable[[int], Array] | None = None,
    ) -> None:
        first, second, third = np.random.default_rng((seed, 0x7219)).spawn(3)
        self._overhead = _Table(overhead.stream((workers,), first))
        self._pace = _Table((seconds_per_sample or Constant(0.0)).stream((workers,), second))
        self._changes = sorted(changes)
        self._noise, self._knee = np.broadcast_to(noise, (workers,)), np.broadcast_to(knee, (workers,))
        self._further = _Table(third.standard_normal(workers) for _ in count())
        self._transfer = transfer or (lambda number: np.zeros(workers))

    def seconds(self, worker: int, number: int, load: int, now: float) -> float:
        """What the worker's ``number``-th task (from 0) with ``load`` samples takes if begun at ``now``."""
        with np.errstate(over="ignore", invalid="ignore"):  # said below
            pace = self._pace.row(number)[worker]
            if self._noise[worker]:
                pace = pace * np.exp(self._noise[worker] * self._further.row(number)[worker])
            overhead = self._overhead.row(number)[worker] + self._transfer(number)[worker]
            seconds = overhead + max(load, self._knee[worker]) * pace
        if np.isnan(seconds):
            raise PacelineError(
                f"the trace has no time for task {number + 1} of worker {worker}; give one without gaps"
            )
        if seconds > costs.MOST:
            raise PacelineError(
                f"task {number + 1} of worker {worker} with {load} samples would take {seconds:.3g} seconds; "
                f"expected {costs.SPAN_0}: give its timing model a smaller spread"
            )
        for change in self._changes:
            if change.at <= now and worker in change.workers:
                seconds *= change.factor
        return float(seconds)


class _Table:
    """A stream's rows, drawn as far as they are asked for."""

    def __init__(self, stream: Iterator[Array]) -> None:
        self._stream, self._rows = stream, list[Array]()

    def row(self, number: int) -> Array:
        while len(self._rows) <= number:
            row = next(self._stream, None)
            if row is None:
                raise PacelineError(
                    f"the trace has {len(self._rows)} rounds and a worker begins its task {number + 1}; give a "
                    "longer trace, or ask for fewer updates"
                )
            self._rows.append(np.array(row))
        return self._rows[number]
