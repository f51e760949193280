"""A worker of the parameter server: a Ray actor that computes gradients, and stops when it is told to."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from paceline.machines import Machine, measure
from paceline.paramserver.aggregate import Part, Sum
from paceline.rounds import Indices, Vector

Gradient = Callable[[Vector, Indices], tuple[Vector, float]]
Program = Callable[[int], tuple[Vector, Gradient]]
Delay = Callable[[int, int, int], float]


class Report(NamedTuple):
    """What comes back beside a gradient. seconds: of the computation, sleeps included."""

    number: int
    loss: float
    seconds: float
    cancelled: bool
    buffers: Vector | None


class Worker:
    """Computes what it is asked for, one gradient after the other.

    program: makes the first parameters and the gradient function, once, here: see ``paceline.ray.train``.
    pieces: a gradient is computed in this many, between which it can be interrupted.
    delay: (worker, version, samples) -> seconds to sleep, to try out uneven speeds.
    """

    def __init__(self, rank: int, program: Program, pieces: int, delay: Delay | None) -> None:
        self._rank, self._delay, self._pieces = rank, delay, pieces
        self._first, self._gradient = program(rank)
        self._whole: Any = None  # the parts' parameters together, in memory that is used again
        self._newest = -1  # version of these
        self._sum, self._round, self._run = (
            Sum(statistics=False),
            -1,
            0,
        )  # of a round in pieces: its task, samples
        self._cancelled = -1
        self._changed = threading.Condition()

    def first(self) -> Vector:
        """The parameters that the program begins with."""
        return self._first

    def process(self) -> tuple[int, int]:
        """Number of parameters, and the process, once the worker is up."""
        return len(self._first), os.getpid()

    def machine(self) -> Machine:
        """What this worker's machine is."""
        return measure()

    def compute(self, number: int, version: int, samples: Indices, *values: Vector) -> tuple[Any, ...]:
        """The mean gradient over the samples, a part for each shard, and a Report.

        A cancelled gradient is None.
        """
        began = time.perf_counter()
        whole = self._joined(version, values)
        total: Any = None
        loss, done = 0.0, False
        if self._delay is not None:
            self._sleep(self._delay(self._rank, version, len(samples)), number)
        for piece in np.array_split(samples, min(self._pieces, len(samples))):
            if self._cancelled >= number:
                break
            gradient, mean = self._gradient(whole, piece)
            if len(piece) == len(samples):
                total, loss, done = gradient, mean, True
                break
            part = gradient * gradient.dtype.type(len(piece) / len(samples))
            total = part if total is None else total + part
            loss += mean * len(piece) / len(samples)
        else:
            done = True
        buffers = getattr(self._gradient, "buffers", None)
        report = Report(
            number, loss, time.perf_counter() - began, not done, buffers() if buffers and done else None
        )
        if not done or total is None:
            return (*(None,) * len(values), report)
        return (*np.array_split(total, len(values)), report)

    def piece(self, number: int, version: int, samples: Indices, *values: Vector) -> Report:
        """Add the gradient over these samples to what the round's task has; a Report."""
        began = time.perf_counter()
        if number != self._round:
            self._round, self._run = number, 0
            self._sum.clear()
        if self._delay is not None:
            before = self._delay(self._rank, version, self._run) if self._run else 0.0
            self._sleep(self._delay(self._rank, version, self._run + len(samples)) - before, number)
        if self._cancelled >= number:
            return Report(number, 0.0, time.perf_counter() - began, True, None)
        gradient, loss = self._gradient(self._joined(version, values), samples)
        self._sum.add(Part(gradient, loss, len(samples)))
        self._run += len(samples)
        return Report(number, loss, time.perf_counter() - began, False, None)

    def deliver(self, number: int, parts: int) -> tuple[Any, ...]:
        """The mean gradient over what the task has had since it last delivered, and a Report."""
        if number != self._round or self._cancelled >= number:
            return (*(None,) * parts, Report(number, 0.0, 0.0, True, None))
        found = self._sum.take()
        buffers = getattr(self._gradient, "buffers", None)
        report = Report(number, found.loss, 0.0, False, buffers() if buffers else None)
        return (*np.array_split(found.step, parts), report)

    def cancel(self, number: int) -> None:
        """Leave undone what is asked for up to this task."""
        with self._changed:
            self._cancelled = max(self._cancelled, number)
            self._changed.notify_all()

    def _joined(self, version: int, parts: tuple[Vector, ...]) -> Any:
        if len(parts) == 1:
            return parts[0]
        if version != self._newest:
            self._whole, self._newest = np.concatenate(parts, out=self._whole), version
        return self._whole

    def _sleep(self, seconds: float, number: int) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._cancelled >= number, max(seconds, 0.0))
