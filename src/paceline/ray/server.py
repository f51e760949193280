"""Training on Ray: worker actors compute gradients, server actors hold the parameters, and this loop decides.

The loop only gets small messages: gradients and parameters pass through the object store (``shards``). The server
actors are on this process's node, and a gradient counts as arrived when it is on that node as well. So the loss of
workers and their nodes can neither delay an update nor make it fail.
"""

from __future__ import annotations

import logging
import math
import queue
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import ray
from ray.exceptions import RayActorError, RayError, RayTaskError

from paceline.errors import PacelineError, WorkerError, number, short, switches, whole
from paceline.machines import sizes
from paceline.paramserver.absence import Absence, Step
from paceline.paramserver.config import ServerConfig
from paceline.paramserver.coordinator import Coordinator
from paceline.paramserver.engine import Answer, Arrive, Moved, Start, Task, Update, WorkerJoin, WorkerLeave
from paceline.paramserver.samples import SampleSource
from paceline.paramserver.starts import Starts
from paceline.ray.pieces import Pieces
from paceline.ray.shards import Arrived, Shards
from paceline.ray.start import START_SECONDS, Closing, connect
from paceline.ray.worker import Crew, Delay, GradientReport, Program, check_functions, last_line
from paceline.rounds import Indices, Vector

LOOK_SECONDS = 0.25  # at most, between two checks of deadlines, joining workers and commands
_log = logging.getLogger(__name__)


class _Sent(NamedTuple):
    """A task that was sent to an actor, with the refs of its gradient; none for a piece of a shared round."""

    task: Task
    actor: Any
    parts: list[Any]  # a ref for each server actor
    report: Any  # the ref of its ``GradientReport``


class Server(Closing):
    """One run; use it in a ``with`` statement, which ends the actors.

    Args:
        program: As for ``train``.
        config: The rules of the run.
        pool: The samples, ``Epochs`` or ``Draws``.
        on_update: Called with each ``Update``.
        address: As for ``train``.
        cpus: CPUs that Ray reserves for each worker.
        shards: Server actors; 0 to choose by the model's size.
        delay: As for ``train``.
        give_up: A worker may take this many times the longest recent round trip of its own load, plus ``grace``
            seconds, before its work goes to the others; 1 or more.
        grace: Seconds, see ``give_up``.
        replace: Start a new worker for each one that dies.
        state: The result of ``state`` from which to continue.

    Raises:
        PacelineError: For an argument that is out of range or of another type.
    """

    def __init__(
        self,
        program: Program,
        config: ServerConfig,
        pool: SampleSource,
        on_update: Callable[[Update], None] | None = None,
        *,
        address: str | None = None,
        cpus: float = 0.0,
        shards: int = 0,
        delay: Delay | None = None,
        give_up: float = 4.0,
        grace: float = 1.0,
        replace: bool = False,
        state: dict[str, Any] | None = None,
    ) -> None:
        check_functions("on_update", "delay", program=program, on_update=on_update, delay=delay)
        if not isinstance(pool, SampleSource):
            raise PacelineError(
                f"pool={short(pool)}: expected Epochs or Draws of paceline.paramserver.samples"
            )
        number("cpus", cpus, "CPUs of each worker, 0 or more", lambda cpus: 0 <= cpus < math.inf)
        whole("shards", shards, 0)
        number("give_up", give_up, "1 or more", lambda times: 1 <= times < math.inf)
        number("grace", grace, "seconds, 0 or more", lambda seconds: 0 <= seconds < math.inf)
        switches(replace=replace)
        self.config, self.pool = config, pool
        self.on_update = on_update or (lambda update: None)
        self._give_up, self._grace, self._replace = give_up, grace, replace
        self._commands: queue.SimpleQueue[tuple[str, int]] = queue.SimpleQueue()
        self._starts = Starts()
        self._absence = Absence(START_SECONDS)  # by then, workers that were started instead would be up
        self._pending: dict[Any, _Sent] = {}  # by each ref that is not on this node yet
        self._here: dict[int, Arrived] = {}  # arrived gradients by task
        self.buffers: Vector | None = None
        self._coordinator = Coordinator(self, config, pool, self._updated, shares=True)
        self._round = Pieces(self, self._coordinator)
        before = state or {}
        self.updates = self._before = int(before.get("version", 0))
        self._ours = connect(address, config.workers + 1)
        self._crew: Crew
        self.shards: Shards
        try:
            pieces = 4 if config.mode == "push-interrupt" else 1
            self._crew = Crew(config.workers, program, pieces, delay, cpus)
            self._actors, self.processes = self._crew.actors, self._crew.processes
            self._launch(before, shards)
        except BaseException:
            self.close()
            raise
        self._began = time.perf_counter()

    def run(self, updates: int | None = None, seconds: float | None = None) -> Vector:
        """Train until ``updates`` are made, ``seconds`` have passed, or all samples are used.

        Args:
            updates: Number of updates; None for no limit.
            seconds: Seconds; None for no limit.

        Returns:
            The newest parameters, one flat vector.

        Raises:
            WorkerError: If no worker is left, if none has answered for 120 s after all were given up, or if a
                server actor has died.
        """
        coordinator = self._coordinator
        if not coordinator.present:
            coordinator.handle(Start(self._now(), frozenset(self._actors)))
        while not self.pool.finished() and (updates is None or self.updates < updates):
            now = self._now()
            if seconds is not None and now > seconds:
                break
            if not self._pending and not self._crew.starting:
                raise WorkerError(
                    f"no worker is left after update {self.updates}; continue from the last checkpoint"
                )
            self._wait(now)
            self._look_after()
        return self.values()

    def values(self) -> Vector:
        """Fetch the newest parameters.

        Returns:
            One flat vector.
        """
        return self.shards.values()

    def state(self) -> dict[str, Any]:
        """What is needed to continue, together with the pool's own state.

        Returns:
            Parameters, momentum, version and buffers, by name.
        """
        return {
            "values": self.values(),
            "velocity": self.shards.velocity(),
            "version": self.updates,
            "buffers": self.buffers,
        }

    def present(self) -> set[int]:
        """The workers that take part now.

        Returns:
            Their numbers, from 0.
        """
        return set(self._coordinator.present)

    def leave(self, worker: int) -> None:
        """Let a worker leave; safe from any thread.

        Args:
            worker: A worker's number, from 0.
        """
        self._commands.put(("leave", worker))

    def add(self) -> None:
        """Start a worker in the first place that is or becomes free; it joins when it is up. Safe from any thread."""
        self._commands.put(("add", -1))

    def close(self) -> None:
        """End all actors, and Ray if it was started for them."""
        for part in ("_crew", "shards"):
            if hasattr(self, part):
                getattr(self, part).close()
        if self._ours:
            ray.shutdown()

    # What the coordinator calls.

    def compute(self, task: Task) -> None:
        """Send a task to its worker.

        Args:
            task: The worker, the version and the samples.
        """
        if task.shared:
            self._round.begin(task, self._now())
            return
        method = self._actors[task.worker].compute.options(num_returns=len(self.shards) + 1)
        version = self._before + task.version
        self._await(task, method.remote(task.number, version, task.taken, *self.shards.refs))

    def send(self, task: Task, samples: Indices) -> None:
        """Let a task's worker add the gradient of these samples to its sum for a shared round.

        Args:
            task: A task of a shared round.
            samples: Positions of the samples, shape (count,).
        """
        version = self._before + task.version
        method = self._actors[task.worker].piece
        self._await(task, [method.remote(task.number, version, samples, *self.shards.refs)])

    def ask(self, task: Task) -> None:
        """Let a worker deliver its sum, of the task's samples, after the pieces that were sent before.

        Args:
            task: A task of a shared round.
        """
        method = self._actors[task.worker].deliver.options(num_returns=len(self.shards) + 1)
        self._await(task, method.remote(task.number, len(self.shards)))

    def cancel(self, tasks: list[Task]) -> None:
        """Cancel these tasks in the workers that are still computing them, and discard the gradients.

        Args:
            tasks: The tasks; those that are done already are ignored.
        """
        for task in tasks:
            finished = self._here.pop(task.number, None) is not None
            if not finished and task.worker in self._actors:
                self._actors[task.worker].cancel.remote(task.number)
            if task.shared:
                self._round.lose(task.worker, self._now())

    def update(self, parts: list[tuple[Task, float]], batch: float | None, rate: float) -> Moved:
        """Let the server actors move the parameters.

        Args:
            parts: The tasks whose gradients count, each with its weight.
            batch: Samples by which the sum is divided; None for those of the gradients.
            rate: The learning rate.

        Returns:
            The loss, and the squared norm and variance of the gradients.
        """
        if parts[0][0].shared:
            arrived = self._round.portions()
        else:
            arrived = [self._here.pop(task.number)._replace(weight=weight) for task, weight in parts]
        norm2, variance = self.shards.update(arrived, batch, rate)
        loss = np.average([each.loss for each in arrived], weights=[each.samples for each in arrived])
        return Moved(float(loss), norm2, variance)

    def _await(self, task: Task, refs: list[Any]) -> None:
        sent = _Sent(task, self._actors[task.worker], refs[:-1], refs[-1])
        self._pending.update(dict.fromkeys(refs, sent))

    def _updated(self, update: Update) -> None:
        update.within = self._round.record
        update.step += self._before
        self.updates = update.version
        self.on_update(update)

    def _launch(self, state: dict[str, Any], shards: int) -> None:
        size = self._crew.start()
        values = state["values"] if state else self._crew.ask("first", [0])[0]
        if len(values) != size:
            raise PacelineError(
                f"the checkpoint has {len(values)} parameters, the model {size}; expected one of the same model"
            )
        self.shards = Shards(
            values,
            self.config.momentum,
            self._coordinator.statistics,
            velocity=state.get("velocity"),
            version=self.updates,
            count=shards,
        )
        if self._coordinator.balancer.policy.needs_machines:
            self._coordinator.set_machines(sizes(self._crew.ask("machine", range(self.config.workers))))
        self.buffers = state.get("buffers")

    def _wait(self, now: float) -> None:
        """Wait for the next message, and handle all that have arrived."""
        watched = [*self._pending, *self._crew.starting]
        due = min(self._coordinator.due(self._give_up, self._grace).values(), default=math.inf)
        timeout = min(max(min(due, self._round.due()) - now, 0.0), LOOK_SECONDS)
        ready, rest = ray.wait(watched, num_returns=1, timeout=timeout)
        if ready and rest:
            ready += ray.wait(rest, num_returns=len(rest), timeout=0)[0]
        for ref in ready:
            if ref in self._crew.starting:
                self._welcome(ref)
            else:
                sent = self._pending.pop(ref)
                if not any(each in self._pending for each in (*sent.parts, sent.report)):
                    self._take(sent)
            if self.pool.finished():
                break

    def _welcome(self, ref: Any) -> None:
        """Let a worker that was started take part, or start it again if it has failed."""
        try:
            place = self._crew.welcome(ref)
        except WorkerError as error:
            again = self._starts.failed()
            after = "it is started again" if again else "it failed too often; add() tries once more"
            _log.warning("%s; %s", error, after)
            return
        if place is not None:
            self._starts.up()
            self._coordinator.handle(WorkerJoin(self._now(), place))

    def _take(self, sent: _Sent) -> None:
        """Handle a task that has ended, whose results are all on this node or lost."""
        try:
            report: GradientReport = ray.get(sent.report)
        except RayActorError:
            self._gone(sent)
            return
        except RayError as error:
            if isinstance(error, RayTaskError) and not isinstance(error.cause, RayError):
                raise WorkerError(
                    f"worker {sent.task.worker} failed after update {self.updates}: {last_line(error)}"
                ) from error
            self._lost_on_the_way(sent)
            return
        if not math.isfinite(report.loss):
            raise PacelineError(
                f"the loss became {report.loss:g} after update {self.updates}; lower the learning rate (--lr) or "
                "look for bad values in the data"
            )
        try:  # keeps the gradient in memory, without a copy
            kept = ray.get(sent.parts) if self._awaited(sent) else None
        except RayError:
            self._lost_on_the_way(sent)
            return
        self._deliver(sent, report, kept)

    def _deliver(self, sent: _Sent, report: GradientReport, kept: Any) -> None:
        """Pass a finished task to the coordinator, or let its worker take part again if it was given up."""
        task, coordinator = sent.task, self._coordinator
        if not report.cancelled and report.buffers is not None and len(report.buffers):
            mixed = report.buffers if self.buffers is None else 0.9 * self.buffers + 0.1 * report.buffers
            self.buffers = mixed
        if self._awaited(sent) and task.shared:
            self._share(sent, report, kept)
        elif self._awaited(sent):
            here = Arrived(task.number, task.load, 1.0, sent.parts, report.loss, kept)
            self._here[task.number] = here
            coordinator.handle(Arrive(self._now(), task.worker, task.number, report.seconds))
            if task.number in self._here and task.tag == coordinator.version:
                self.shards.hold(here)
        else:
            if self._actors.get(task.worker) is sent.actor:
                coordinator.handle(Answer(self._now(), task.worker))
            self._take_back(sent)

    def _share(self, sent: _Sent, report: GradientReport, kept: Any) -> None:
        """Handle a piece of a shared round that was run, or the gradient of several pieces."""
        task, now = sent.task, self._now()
        if not sent.parts:
            self._round.reported(task.worker, now)
            return
        arrived = self._round.delivered(task, sent.parts, report.loss, kept, now)
        version = self._coordinator.version
        self._round.finish(now)
        if self._coordinator.version == version:
            self.shards.hold(arrived)

    def _awaited(self, sent: _Sent) -> bool:
        running = self._coordinator.tasks.get(sent.task.worker)
        return running is not None and running.number == sent.task.number

    def _take_back(self, sent: _Sent) -> None:
        """Let a worker that was given up take part again, since it has ended its task."""
        worker = sent.task.worker
        if worker not in self._coordinator.present and self._actors.get(worker) is sent.actor:
            self._coordinator.handle(WorkerJoin(self._now(), worker, sent.task))

    def _lost_on_the_way(self, sent: _Sent) -> None:
        """Handle a gradient that was computed and then lost, with its node or its node's memory."""
        if self._awaited(sent):
            self._coordinator.handle(WorkerLeave(self._now(), sent.task.worker, "lost"))
        self._take_back(sent)  # if its worker is dead as well, its next task shows that

    def _look_after(self) -> None:
        """Handle claims, deadlines and commands."""
        now = self._now()
        if not self.pool.finished():
            self._round.claim(now)
            for worker, due in self._coordinator.due(self._give_up, self._grace).items():
                if now > due:
                    self._coordinator.handle(WorkerLeave(now, worker, "given up"))
        while not self._commands.empty():
            name, worker = self._commands.get()
            if name == "add":
                self._starts.want()
            elif worker in self._actors:
                self._coordinator.handle(WorkerLeave(now, worker, "left"))
                self._crew.remove(worker)
        # A worker that was given up may die later, and only then its place is free.
        while self._starts.wanted and self._crew.add():
            self._starts.began()
            self._absence.began(now)
        self._look_for_anyone(now)

    def _look_for_anyone(self, now: float) -> None:
        """Warn if all workers were given up; raises WorkerError if none of them comes back."""
        step = self._absence.look(now, bool(self._coordinator.present), bool(self._crew.starting))
        if step is Step.NOTHING or self.pool.finished() or not self._actors:
            return
        names = ", ".join(f"worker {place}" for place in sorted(self._actors))
        if step is Step.WARN:
            _log.warning(
                "no worker takes part after update %d: %s may be frozen or cut off; the run waits %g s more for one "
                "of them to answer",
                self.updates,
                names,
                START_SECONDS - self._absence.warns,
            )
            return
        raise WorkerError(
            f"no worker has answered for {START_SECONDS:g} s after update {self.updates}: {names} may be frozen or "
            "cut off; continue from the last checkpoint"
        )

    def _gone(self, sent: _Sent) -> None:
        """Handle the death of the task's worker, whose place another one may have by now."""
        worker = sent.task.worker
        if self._actors.get(worker) is not sent.actor:
            return
        del self._actors[worker]
        self._coordinator.handle(WorkerLeave(self._now(), worker, "died"))
        if self._replace:
            self._starts.want()

    def _now(self) -> float:
        return time.perf_counter() - self._began
