"""A parameter server on a virtual clock, with real gradients.

Virtual time decides which gradients are used and when parameters move; a gradient is computed only when an update
uses it. A run is deterministic for a seed.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import count
from typing import NamedTuple, Protocol

import numpy as np

from paceline import costs
from paceline.errors import PacelineError
from paceline.paramserver.aggregate import Parameters, WorkerGradient, aggregate
from paceline.paramserver.config import ServerConfig
from paceline.paramserver.coordinator import Coordinator
from paceline.paramserver.engine import Arrive, Moved, Start, Task, Update, WorkerJoin, WorkerLeave
from paceline.paramserver.samples import SampleSource
from paceline.rounds import Array, Indices, Vector
from paceline.simulate.timing import Constant, TimingModel


class SpeedChange(NamedTuple):
    """A change of speed: from ``at`` seconds on, these workers' round trips take ``factor`` times as long."""

    at: float
    workers: tuple[int, ...]
    factor: float


class RoundTrips:
    """Seconds of each worker's j-th task: overhead plus load times seconds per sample, from one timing model each.

    The seconds of a worker's j-th task depend only on the seed, the worker and j, so policies that order the tasks
    differently run on the same cluster.

    changes: changes of speed at given times. noise: further spread of each task's pace, the standard deviation of
    its logarithm. knee: samples below which a task takes as long as with that many. transfer: seconds that each
    worker's link takes for its j-th task, by j. noise and knee: one for all workers, or of shape (n,).
    """

    def __init__(
        self,
        workers: int,
        overhead: TimingModel,
        seconds_per_sample: TimingModel | None = None,
        seed: int = 0,
        changes: Sequence[SpeedChange] = (),
        noise: Array | float = 0.0,
        knee: Array | float = 0.0,
        transfer: Callable[[int], Array] | None = None,
    ) -> None:
        first, second, third = np.random.default_rng((seed, 0x7219)).spawn(3)
        self._overhead = _rows(overhead.stream((workers,), first))
        self._pace = _rows((seconds_per_sample or Constant(0.0)).stream((workers,), second))
        self._changes = sorted(changes)
        self._noise, self._knee = np.broadcast_to(noise, (workers,)), np.broadcast_to(knee, (workers,))
        self._further = _rows(third.standard_normal(workers) for _ in count())
        self._transfer = transfer or (lambda number: np.zeros(workers))

    def seconds(self, worker: int, number: int, load: int, now: float) -> float:
        """Seconds of the worker's ``number``-th task (from 0) with ``load`` samples if it starts at ``now``."""
        with np.errstate(over="ignore", invalid="ignore"):  # checked below
            pace = self._pace(number)[worker]
            if self._noise[worker]:
                pace = pace * np.exp(self._noise[worker] * self._further(number)[worker])
            overhead = self._overhead(number)[worker] + self._transfer(number)[worker]
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


def _rows(stream: Iterator[Array]) -> Callable[[int], Array]:
    """A function from a number to that row of a stream, which is drawn only as far as needed."""
    rows: list[Array] = []

    def row(number: int) -> Array:
        while len(rows) <= number:
            if (drawn := next(stream, None)) is None:
                raise PacelineError(
                    f"the trace has {len(rows)} rounds, but a worker starts its task {number + 1}; give a "
                    "longer trace, or fewer updates"
                )
            rows.append(np.array(drawn))
        return rows[number]

    return row


FINISH, MEMBERS = 0, 1  # at equal times, tasks finish before workers join or leave


class Learner(Protocol):
    """Computes the gradients that train a model."""

    def start(self) -> Vector:
        """The first parameters."""
        ...

    def gradient(self, values: Vector, samples: Indices) -> tuple[Vector, float]:
        """The gradient of the mean loss over these samples, and that loss."""
        ...


class MemberEvent(NamedTuple):
    """At ``at`` seconds a worker joins ("join"), leaves with notice ("leave"), stops without notice ("freeze"), or
    works again ("thaw").

    A frozen worker is given up when its deadline has passed. In ``by_update`` of a server, ``at`` is the number of
    updates made.
    """

    at: float
    worker: int
    kind: str


class SimulatedServer:
    """One run. ``run`` plays it to its end; ``parameters`` then holds the model.

    members: events of workers at given times; by_update: after given numbers of updates.
    absent: workers that are absent at the start.
    give_up, grace: as for ``Coordinator.due``; with give_up = 0 a frozen worker is given up ``grace``
        seconds after its task started.
    """

    def __init__(
        self,
        learner: Learner,
        config: ServerConfig,
        trips: RoundTrips,
        pool: SampleSource,
        members: Sequence[MemberEvent] = (),
        absent: Sequence[int] = (),
        give_up: float = 4.0,
        grace: float = 1.0,
        by_update: Sequence[MemberEvent] = (),
    ) -> None:
        self.parameters = Parameters(learner.start(), config.momentum)
        self.updates: list[Update] = []
        self.now = 0.0
        self._learner, self._trips, self._pool = learner, trips, pool
        self._give_up, self._grace = give_up, grace
        self._coordinator = Coordinator(self, config, pool, self.updates.append)
        self._heap: list[tuple[float, int, int, Callable[[], None]]] = []
        self._sequence = count()
        self._reading: dict[int, Vector] = {}  # by task: the parameters at which its gradient is computed
        self._counts: dict[int, int] = {}
        self._ends: dict[int, Array] = {}  # by task: when each of its pieces is done
        self._frozen: set[int] = set()
        # By frozen worker: its task, and the task's seconds left after it thaws.
        self._stuck: dict[int, tuple[Task, float]] = {}
        self._upcoming = deque(sorted(by_update, key=lambda member: (member.at, member.kind == "thaw")))
        self._absent = set(absent)
        for member in members:
            self._push(member.at, MEMBERS, partial(self._member, member))

    def run(
        self,
        updates: int | None = None,
        seconds: float | None = None,
        stop: Callable[[Update], bool] | None = None,
    ) -> list[Update]:
        """Play up to a number of updates or of virtual seconds, or until ``stop`` is True or all samples are used."""
        coordinator = self._coordinator
        coordinator.handle(Start(0.0, frozenset(range(coordinator.workers)) - self._absent))
        seen = 0
        self._catch_up()
        while self._heap:
            now, _, _, happens = heapq.heappop(self._heap)
            if seconds is not None and now > seconds:
                break
            self.now = now
            happens()
            self._catch_up()
            while seen < len(self.updates):
                seen += 1
                if seen == updates or (stop is not None and stop(self.updates[seen - 1])):
                    return self.updates[:seen]
            if self._pool.finished():
                break
        return self.updates

    def compute(self, task: Task) -> None:
        """Store the task's end and the parameters that it reads."""
        number = self._counts.get(task.worker, 0)
        self._counts[task.worker] = number + 1
        self._reading[task.number] = self.parameters.values
        took = self._seconds(task, number)
        if task.worker in self._frozen:
            self._stuck[task.worker] = task, took
            self._watch(task)
        else:
            self._push(self.now + took, FINISH, partial(self._finish, task))

    def _seconds(self, task: Task, number: int) -> float:
        """Seconds of the worker's ``number``-th task, up to the end of the piece in which its time is over."""
        if not task.pieces:
            return self._trips.seconds(task.worker, number, task.load, self.now)
        loads = task.ends().tolist()
        ends = np.array([self._trips.seconds(task.worker, number, load, self.now) for load in loads])
        self._ends[task.number] = ends = ends[: int((ends < task.cut).sum()) + 1]
        return float(ends[-1])

    def cancel(self, tasks: list[Task]) -> None:
        """Discard what these tasks read; their ends are then ignored."""
        for task in tasks:
            self._reading.pop(task.number, None)
            self._ends.pop(task.number, None)

    def update(self, parts: list[tuple[Task, float]], batch: float | None, rate: float) -> Moved:
        """Compute these gradients, and move the parameters."""
        computed = []
        for task, weight in parts:
            gradient, loss = self._learner.gradient(self._reading.pop(task.number), task.taken)
            computed.append(WorkerGradient(gradient, loss, task.load, weight))
        found = aggregate(computed, batch)
        self.parameters.move(found.step, rate)
        return Moved(found.loss, found.norm2, found.variance)

    def _finish(self, task: Task) -> None:
        worker = task.worker
        if worker in self._frozen:  # it froze during this task
            self._stuck[worker] = task, 0.0
            self._watch(task)
            return
        running = self._coordinator.tasks.get(worker)
        if running is not None and running.number == task.number:
            ends = self._ends.pop(task.number, None)
            self._coordinator.handle(Arrive(self.now, worker, task.number, ends=ends))

    def _member(self, member: MemberEvent) -> None:
        if member.kind == "join":
            self._coordinator.handle(WorkerJoin(self.now, member.worker))
        elif member.kind == "leave":
            self._coordinator.handle(WorkerLeave(self.now, member.worker))
        elif member.kind == "freeze":
            self._frozen.add(member.worker)
        elif member.worker in self._frozen:  # it works again
            self._frozen.remove(member.worker)
            task, rest = self._stuck.pop(member.worker, (None, 0.0))
            if member.worker not in self._coordinator.present:
                self._coordinator.handle(WorkerJoin(self.now, member.worker, task))
            elif task is not None:
                self._push(self.now + rest, FINISH, partial(self._finish, task))

    def _catch_up(self) -> None:
        """Apply the events that are due after the updates made so far; one of them may cause the next update."""
        while self._upcoming and self._upcoming[0].at <= len(self.updates):
            self._member(self._upcoming.popleft())

    def _watch(self, task: Task) -> None:
        """Schedule the check of a frozen worker's deadline."""
        deadline = self._coordinator.due(self._give_up, self._grace).get(task.worker)
        if deadline is not None:
            self._push(max(deadline, self.now), MEMBERS, partial(self._check, task.worker))

    def _check(self, worker: int) -> None:
        if worker in self._frozen and worker in self._coordinator.tasks:
            self._coordinator.handle(WorkerLeave(self.now, worker, "given up"))

    def _push(self, at: float, priority: int, happens: Callable[[], None]) -> None:
        heapq.heappush(self._heap, (at, priority, next(self._sequence), happens))
