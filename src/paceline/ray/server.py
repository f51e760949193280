"""Training on Ray: worker actors compute gradients, server actors keep the parameters, this loop decides.

The loop sees only small messages: gradients and parameters go by the object store (``shards``).
"""

from __future__ import annotations

import contextlib
import math
import queue
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from paceline.aggregate import Vector
from paceline.coordinator import Choices, Coordinator, Moved, Task, Update
from paceline.errors import PacelineError, WorkerError
from paceline.ray.shards import Arrived, Shards
from paceline.ray.start import connect
from paceline.ray.worker import Pace, Program, Report, Worker
from paceline.samples import Pool

try:
    import ray
    from ray.exceptions import RayActorError, RayError, RayTaskError
except ImportError as error:
    raise PacelineError("the Ray engine needs ray: pip install 'paceline[ray]'") from error

LOOK_SECONDS = 0.25  # at most between two looks at deadlines, joiners and commands


class Server:
    """One run; use it in a ``with`` statement, which ends the actors.

    program: see ``train``. pool: the samples. on_update: gets each ``Update``.
    give_up, floor: a worker may take ``give_up`` times the longest recent round trip of its own load, plus
        ``floor`` seconds, before its work goes to the others.
    replace: start a new worker for each one that dies.
    state: what ``state`` gave, to go on from there.
    """

    def __init__(
        self,
        program: Program,
        choices: Choices,
        pool: Pool,
        on_update: Callable[[Update], None] | None = None,
        *,
        address: str | None = None,
        cpus: float = 0.0,
        shards: int = 0,
        pace: Pace | None = None,
        give_up: float = 4.0,
        floor: float = 1.0,
        replace: bool = False,
        start_seconds: float = 120.0,
        state: dict[str, Any] | None = None,
    ) -> None:
        self.choices, self.pool = choices, pool
        self.on_update = on_update or (lambda update: None)
        self._give_up, self._floor, self._replace = give_up, floor, replace
        self._commands: queue.SimpleQueue[tuple[str, int]] = queue.SimpleQueue()
        self._pending: dict[Any, Task] = {}  # by the ref of its report
        self._gradients: dict[int, list[Any]] = {}  # by task
        self._losses: dict[int, float] = {}
        self._starting: dict[Any, int] = {}  # refs of joiners' first words
        self._lost: set[int] = set()
        self.buffers: Vector | None = None
        self._coordinator = Coordinator(self, choices, pool, self._updated)
        self.updates = self._before = 0 if state is None else int(state["version"])
        self._ours = connect(address, choices.workers + 1)
        self.processes: dict[int, int] = {}
        self._actors: dict[int, Any] = {}
        self.shards: Shards
        try:
            self._program = ray.put(program)
            self._pace, self._cpus = pace, cpus
            self._pieces = 4 if choices.mode == "push-interrupt" else 1
            self._launch(start_seconds, state, shards)
        except BaseException:
            self.close()
            raise
        self._began = time.perf_counter()

    def run(self, updates: int | None = None, seconds: float | None = None) -> Vector:
        """Train until so many updates are made, or seconds have passed, or all samples are used; the parameters.

        Raises WorkerError when no worker is left, or a server actor has died.
        """
        coordinator = self._coordinator
        if not coordinator.present:
            coordinator.start(self._now(), set(self._actors))
        while not self.pool.finished() and (updates is None or self.updates < updates):
            now = self._now()
            if seconds is not None and now > seconds:
                break
            if not self._pending and not self._starting:
                raise WorkerError(
                    f"no worker is left after update {self.updates}; go on from the last checkpoint"
                )
            self._wait(now)
            self._look_after()
        return self.values()

    def values(self) -> Vector:
        """The newest parameters."""
        return self.shards.values()

    def state(self) -> dict[str, Any]:
        """Parameters, momentum and version: with the pool's own state all that is needed to go on."""
        return {
            "values": self.values(),
            "velocity": self.shards.velocity(),
            "version": self.updates,
            "buffers": self.buffers,
        }

    def present(self) -> set[int]:
        """The workers that take part now."""
        return set(self._coordinator.present)

    def leave(self, worker: int) -> None:
        """Let a worker go; safe from any thread."""
        self._commands.put(("leave", worker))

    def add(self) -> None:
        """Start a worker in the first free place; it joins when it is up. Safe from any thread."""
        self._commands.put(("add", -1))

    def close(self) -> None:
        """End all actors, and the Ray that was started for them."""
        for actor in self._actors.values():
            with contextlib.suppress(RayError):
                ray.kill(actor)
        self._actors = {}
        if hasattr(self, "shards"):
            self.shards.close()
        if self._ours:
            ray.shutdown()

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    # What the coordinator calls.

    def compute(self, task: Task) -> None:
        """Send a task to its worker."""
        samples = self.pool.indices(task.taken)
        refs = (
            self._actors[task.worker]
            .compute.options(num_returns=len(self.shards) + 1)
            .remote(task.number, self._before + task.version, samples, *self.shards.refs)
        )
        self._pending[refs[-1]] = task
        self._gradients[task.number] = refs[:-1]

    def cancel(self, tasks: list[Task]) -> None:
        """Tell the workers that are still at it, and forget the gradients."""
        for task in tasks:
            self._gradients.pop(task.number, None)
            finished = self._losses.pop(task.number, None) is not None
            if not finished and task.worker in self._actors:
                self._actors[task.worker].cancel.remote(task.number)

    def update(self, parts: list[tuple[Task, float]], batch: float | None, rate: float) -> Moved:
        """Have the server actors move the parameters."""
        arrived = [
            Arrived(task.number, task.load, weight, self._gradients.pop(task.number))
            for task, weight in parts
        ]
        norm2, variance = self.shards.update(arrived, batch, rate)
        losses = [self._losses.pop(task.number) for task, _ in parts]
        loss = np.average(losses, weights=[task.load for task, _ in parts])
        return Moved(float(loss), norm2, variance)

    def _updated(self, update: Update) -> None:
        update.version += self._before
        self.updates = update.version
        self.on_update(update)

    def _launch(self, start_seconds: float, state: dict[str, Any] | None, shards: int) -> None:
        first = {self._actor(rank): rank for rank in range(self.choices.workers)}
        there = self._join(first, start_seconds)
        if len(there) < self.choices.workers:
            raise PacelineError(
                f"{self.choices.workers - len(there)} of {self.choices.workers} workers did not start in "
                f"{start_seconds:g} s; look at the Ray cluster's free CPUs and memory"
            )
        size = there[0]
        values = state["values"] if state is not None else ray.get(self._actors[0].first.remote())
        if len(values) != size:
            raise PacelineError(
                f"the checkpoint has {len(values)} parameters, the model {size}; it is another model's"
            )
        self.shards = Shards(
            values,
            self.choices.momentum,
            self._coordinator.statistics,
            velocity=None if state is None else state["velocity"],
            version=self.updates,
            count=shards,
            cpus=self._cpus,
        )
        self.buffers = None if state is None else state.get("buffers")

    def _actor(self, rank: int) -> Any:
        """Start the worker's actor; the ref of its first word."""
        remote: Any = ray.remote(concurrency_groups={"control": 1})(_controlled())  # type: ignore[call-overload]
        self._actors[rank] = remote.options(
            num_cpus=self._cpus, max_restarts=0, scheduling_strategy="SPREAD"
        ).remote(rank, self._program, self._pieces, self._pace)
        return self._actors[rank].process.remote()

    def _join(self, refs: dict[Any, int], seconds: float) -> list[int]:
        """Wait for first words; the sizes of the models that came up."""
        ready, _ = ray.wait(list(refs), num_returns=len(refs), timeout=seconds)
        sizes = []
        for ref in ready:
            try:
                size, process = ray.get(ref)
            except RayTaskError as error:
                raise WorkerError(f"a worker could not start: {_said(error)}") from error
            except RayActorError as error:
                raise WorkerError(f"a worker could not start: {_said(error)}") from error
            self.processes[refs[ref]] = process
            sizes.append(size)
        return sizes

    def _wait(self, now: float) -> None:
        """Wait for the next thing that happens, and take in all that has."""
        watched = list(self._pending) + list(self._starting)
        due = min(self._coordinator.deadlines(self._give_up, self._floor).values(), default=math.inf)
        timeout = min(max(due - now, 0.0), LOOK_SECONDS)
        ready, rest = ray.wait(watched, num_returns=1, timeout=timeout)
        if ready and rest:
            ready += ray.wait(rest, num_returns=len(rest), timeout=0)[0]
        for ref in ready:
            if ref in self._starting:
                self._welcome(ref)
            else:
                self._take(ref)
            if self.pool.finished():
                break

    def _take(self, ref: Any) -> None:
        """A task has ended, one way or another."""
        task = self._pending.pop(ref)
        worker, coordinator = task.worker, self._coordinator
        try:
            report: Report = ray.get(ref)
        except RayActorError:
            self._gone(worker)
            return
        except RayTaskError as error:
            raise WorkerError(
                f"worker {worker} failed after update {self.updates}: {_said(error)}"
            ) from error
        if not math.isfinite(report.loss):
            raise PacelineError(
                f"the loss became {report.loss:g} after update {self.updates}; lower the learning rate (--lr) or "
                "look for bad values in the data"
            )
        if report.cancelled:
            self._gradients.pop(task.number, None)
        else:
            self._losses[task.number] = report.loss
            if report.buffers is not None and len(report.buffers):
                mixed = report.buffers if self.buffers is None else 0.9 * self.buffers + 0.1 * report.buffers
                self.buffers = mixed
        running = coordinator.tasks.get(worker)
        if running is not None and running.number == task.number:
            coordinator.arrive(worker, task.number, self._now(), report.seconds)
            if task.number in self._gradients and task.tag == coordinator.version:
                self.shards.hold(Arrived(task.number, task.load, 1.0, self._gradients[task.number]))
            return
        self._gradients.pop(task.number, None)
        self._losses.pop(task.number, None)
        if worker not in coordinator.present and worker in self._actors and worker not in self._lost:
            coordinator.join(worker, self._now())  # it was given up, and is back

    def _look_after(self) -> None:
        """Deadlines and commands."""
        now = self._now()
        if not self.pool.finished():
            for worker, due in self._coordinator.deadlines(self._give_up, self._floor).items():
                if now > due:
                    self._coordinator.leave(worker, now, "given up")
        while not self._commands.empty():
            name, worker = self._commands.get()
            if name == "add":
                self._add()
            elif worker in self._actors:
                self._lost.add(worker)
                self._coordinator.leave(worker, now, "left")
                ray.kill(self._actors.pop(worker))

    def _gone(self, worker: int) -> None:
        """The worker's process has died."""
        if worker not in self._actors:
            return
        del self._actors[worker]
        self._coordinator.leave(worker, self._now(), "died")
        if self._replace:
            self._add()

    def _add(self) -> None:
        taken = set(self._actors) | set(self._starting.values())
        free = [rank for rank in range(self.choices.workers) if rank not in taken]
        if free:
            self._starting[self._actor(free[0])] = free[0]

    def _welcome(self, ref: Any) -> None:
        rank = self._starting.pop(ref)
        with contextlib.suppress(WorkerError):
            self._join({ref: rank}, 0.0)
            self._lost.discard(rank)
            self._coordinator.join(rank, self._now())

    def _now(self) -> float:
        return time.perf_counter() - self._began


def _controlled() -> type[Worker]:
    """The worker with ``cancel`` and ``process`` on a thread of their own, so that they pass a computation."""

    class Controlled(Worker):
        pass

    for name in ("cancel", "process"):
        setattr(Controlled, name, ray.method(concurrency_group="control")(getattr(Worker, name)))
    Controlled.__name__ = Worker.__name__
    return Controlled


def _said(error: Exception) -> str:
    """The innermost sentence of one of Ray's many lines."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__
