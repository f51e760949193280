"""Workers of the parameter server: Ray actors that compute gradients (LB-BSP, Alg. 1, worker; WLBS, node's steps)."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import numpy as np
import ray
from ray.exceptions import RayError

from paceline.errors import PacelineError, WorkerError, short
from paceline.machines import Machine, measure
from paceline.paramserver.aggregate import Sum, WorkerGradient
from paceline.ray.start import START_SECONDS, controlled
from paceline.rounds import Indices, Vector

OURS = f"{PacelineError.__module__}.{PacelineError.__qualname__}: "  # before a message in a traceback
Gradient = Callable[[Vector, Indices], tuple[Vector, float]]
Program = Callable[[int], tuple[Vector, Gradient]]
Delay = Callable[[int, int, int], float]


class GradientReport(NamedTuple):
    """The answer that accompanies a gradient. seconds: of the computation, including sleeps."""

    loss: float = 0.0
    seconds: float = 0.0
    cancelled: bool = False
    buffers: Vector | None = None


class GradientWorker:
    """Computes the requested gradients, one after the other.

    program: makes the first parameters and the gradient function, once, in the worker: see ``paceline.ray.train``.
    pieces: into which a gradient is divided; between them it can be interrupted.
    delay: (worker, version, samples) -> seconds to sleep, to try out uneven speeds.
    """

    def __init__(self, rank: int, program: Program, pieces: int, delay: Delay | None) -> None:
        self._rank, self._delay, self._pieces = rank, delay, pieces
        self._first, self._gradient = program(rank)
        self._whole: Any = None  # the parameters of all parts, in memory that is reused
        self._newest = -1  # the version of these parameters
        self._sum = Sum(statistics=False)
        self._round, self._run = -1, 0  # the task of the sum, and its samples so far
        self._cancelled = -1
        self._changed = threading.Condition()

    def first(self) -> Vector:
        """The parameters that the program begins with."""
        return self._first

    @ray.method(concurrency_group="control")
    def process(self) -> tuple[int, int]:
        """The number of parameters and the process number, when the worker has started."""
        return len(self._first), os.getpid()

    def machine(self) -> Machine:
        """A description of this worker's machine."""
        return measure()

    def compute(self, number: int, version: int, samples: Indices, *values: Vector) -> tuple[Any, ...]:
        """The mean gradient over the samples, a part for each shard, and a report. A cancelled gradient is None."""
        began = time.perf_counter()
        pieces = max(
            1, min(self._pieces, len(samples) // 2)
        )  # of two samples or more, as batch norm needs them
        for piece in np.array_split(samples, pieces):
            self.piece(number, version, piece, *values)
        *gradient, report = self.deliver(number, len(values))
        return (*gradient, report._replace(seconds=time.perf_counter() - began))

    def piece(self, number: int, version: int, samples: Indices, *values: Vector) -> GradientReport:
        """Add the gradient over these samples to the task's sum; returns a report."""
        began = time.perf_counter()
        if number != self._round:
            self._round, self._run = number, 0
            self._sum.clear()
        if self._delay is not None:
            before = self._delay(self._rank, version, self._run) if self._run else 0.0
            late = self._delay(self._rank, version, self._run + len(samples)) - before
            with self._changed:
                self._changed.wait_for(lambda: self._cancelled >= number, max(late, 0.0))
        if self._cancelled >= number:
            return GradientReport(cancelled=True)
        gradient, loss = self._gradient(self._joined(version, values), samples)
        self._sum.add(WorkerGradient(gradient, loss, len(samples)))
        self._run += len(samples)
        return GradientReport(loss, time.perf_counter() - began)

    def deliver(self, number: int, parts: int) -> tuple[Any, ...]:
        """The mean gradient over the task's samples since its last delivery, and a report."""
        if number != self._round or self._cancelled >= number:
            return (*(None,) * parts, GradientReport(cancelled=True))
        found = self._sum.take()
        buffers = getattr(self._gradient, "buffers", None)
        report = GradientReport(found.loss, buffers=buffers() if buffers else None)
        return (*np.array_split(found.step, parts), report)

    @ray.method(concurrency_group="control")
    def cancel(self, number: int) -> None:
        """Cancel the tasks up to this number."""
        with self._changed:
            self._cancelled = max(self._cancelled, number)
            self._changed.notify_all()

    def _joined(self, version: int, parts: tuple[Vector, ...]) -> Any:
        if len(parts) == 1:
            return parts[0]
        if version != self._newest:
            self._whole, self._newest = np.concatenate(parts, out=self._whole), version
        return self._whole


class Crew:
    """The workers by place, 0 to ``places`` - 1.

    program, delay, pieces: as for ``GradientWorker``. cpus: CPUs that Ray reserves for each. actors: by place, with
    those that still start. starting: their place and actor, by the ref of their first answer. processes: by place, of
    all workers that have ever been up.
    """

    def __init__(self, places: int, program: Program, pieces: int, delay: Delay | None, cpus: float) -> None:
        self._places, self._pieces, self._delay, self._cpus = places, pieces, delay, cpus
        self._program = ray.put(program)
        self.actors: dict[int, Any] = {}
        self.starting: dict[Any, tuple[int, Any]] = {}
        self.processes: dict[int, int] = {}

    def start(self) -> int:
        """Start all workers and wait for them; returns the number of parameters of their model. Raises WorkerError if
        a worker fails, PacelineError if some do not start in time."""
        first = {self._actor(place): place for place in range(self._places)}
        ready, late = ray.wait(list(first), num_returns=len(first), timeout=START_SECONDS)
        up = [self._up(first[ref], ref) for ref in ready]
        if late:
            raise PacelineError(
                f"{len(late)} of {self._places} workers did not start in {START_SECONDS:g} s; look at the Ray "
                "cluster's free CPUs and memory"
            )
        return up[0]

    def ask(self, method: str, places: Iterable[int]) -> list[Any]:
        """The results of a method of these workers, before their first task."""
        return _answers([getattr(self.actors[place], method).remote() for place in places])

    def add(self) -> bool:
        """Start a worker in the first free place; False if there is none."""
        free = [place for place in range(self._places) if place not in self.actors]
        if free:
            ref = self._actor(free[0])
            self.starting[ref] = free[0], self.actors[free[0]]
        return bool(free)

    def welcome(self, ref: Any) -> int | None:
        """The place of a worker whose first answer has arrived; None if it has left meanwhile. Raises WorkerError if
        it could not start; its place is free then."""
        place, actor = self.starting.pop(ref)
        if self.actors.get(place) is not actor:
            return None
        try:
            self._up(place, ref)
        except WorkerError:
            del self.actors[place]
            raise
        return place

    def remove(self, place: int) -> None:
        """End a worker."""
        with contextlib.suppress(RayError):
            ray.kill(self.actors.pop(place))

    def close(self) -> None:
        """End all."""
        for place in list(self.actors):
            self.remove(place)

    def _actor(self, place: int) -> Any:
        """Start a worker; returns the ref of its first answer."""
        remote = controlled(GradientWorker)
        self.actors[place] = remote.options(
            num_cpus=self._cpus, max_restarts=0, scheduling_strategy="SPREAD"
        ).remote(place, self._program, self._pieces, self._delay)
        return self.actors[place].process.remote()

    def _up(self, place: int, ref: Any) -> int:
        """Note a worker's process; returns the size of its model."""
        size, self.processes[place] = _answers([ref], f"worker {place}")[0]
        return int(size)


def check_functions(*optional: str, **given: Any) -> None:
    """Raises PacelineError for the first that is no function; those named in ``optional`` may be None."""
    for name, value in given.items():
        if not callable(value) and not (value is None and name in optional):
            raise PacelineError(f"{name}={short(value)}: expected a function")


def last_line(error: Exception) -> str:
    """The last line of an error of Ray, which is its cause; of a PacelineError, the message alone."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1].removeprefix(OURS) if lines else type(error).__name__


def _answers(refs: list[Any], who: str = "a worker") -> list[Any]:
    try:
        return list(ray.get(refs))
    except RayError as error:
        raise WorkerError(f"{who} could not start: {last_line(error)}") from error
