"""The parameter server's decisions (WLBS, server's steps): who computes what, when parameters move, and how far.

A coordinator combines a gate (when), a backup policy (how many), a balancer (how much each), a learning-rate rule and
a pool of samples. It reads no clock and computes no gradient: the engine reports events and their times (``handle``),
and the coordinator calls the engine's three methods in the order in which they must happen. It calls them within a
decision because the results of an update (its loss, norm and variance) determine the next decisions.
"""

from __future__ import annotations

import logging
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.backup import Backup, Iteration
from paceline.backup.protocol import Arrivals
from paceline.balancer import Balancer
from paceline.errors import PacelineError
from paceline.paramserver.config import ServerConfig
from paceline.paramserver.deadlines import Deadlines, Trip
from paceline.paramserver.engine import (
    Answer,
    Arrive,
    Engine,
    Event,
    Moved,
    Start,
    Task,
    Update,
    WorkerJoin,
    WorkerLeave,
)
from paceline.paramserver.rates import GradientNoise
from paceline.paramserver.samples import SampleSource
from paceline.rounds import Array, Gradients, Machines, PieceTimes
from paceline.sync import Apply, Drop, Effects, Gradient, Interrupt

STORY = 20  # events that are added to an error
WORDS = {"given up": "was given up", "lost": "was lost"}  # reasons of a leave, as the predicate of a sentence
_log = logging.getLogger(__name__)


class Coordinator:
    """Runs one training. ``handle`` takes all events, beginning with ``Start``; the other methods only read.

    on_update: gets each ``Update``.
    shares: whether the engine can run rounds in pieces, for policies that do so: it then keeps a task's samples until
        the whole round is done, even if the worker is lost, and reports which worker ran which samples.
    """

    def __init__(
        self,
        engine: Engine,
        config: ServerConfig,
        pool: SampleSource,
        on_update: Callable[[Update], None],
        shares: bool = False,
    ) -> None:
        self._gate, backup, self._rate, self.balancer, self._shares = config.build(shares)
        self.engine, self.pool, self._on_update, self._config = engine, pool, on_update, config
        n = config.workers
        self.workers, self.batch = n, config.global_batch
        self.version, self._updated_at, self._numbers = 0, 0.0, 0
        self.tasks: dict[int, Task] = {}  # each worker's current task
        # Gradients that have arrived and are not yet applied or dropped.
        self._held: dict[tuple[int, int], list[tuple[Task, float]]] = {}
        self.present: set[int] = set()
        self._starved: set[int] = set()  # present workers for which there are no samples now
        self.deadlines = Deadlines()
        self._dropped: Counter[str] = Counter()
        self._dropped_samples = 0
        self._changed: list[str] = []  # changes of the present workers since the last update
        self._quorum, self._noise = Quorum(backup, n, self._rates), GradientNoise()
        self._loads = Loads(self.balancer, self._shares)
        # Whether a rule needs the variance of the gradients, for which all of them are read once more.
        self.statistics = self._rate.needs_variance or (backup is not None and backup.needs_variance)
        self.statistics |= self.balancer.policy.needs_noise
        self._story: deque[Event] = deque(maxlen=STORY)
        self._handling: Event | None = None

    def set_machines(self, machines: Machines) -> None:
        """Set the workers' machines; to be called before ``Start`` if the balancing policy needs them."""
        self.balancer = self._config.balancer(machines)
        self._loads = Loads(self.balancer, self._shares)

    def handle(self, event: Event) -> None:
        """Take an event, and let the engine carry out the resulting decisions, in order. All exceptions, also the
        engine's, get a note with the events before this one, for the traceback."""
        outer, self._handling = self._handling, event
        try:
            if outer is not None:
                raise RuntimeError(f"an event came while another was handled: {_words(outer)}")
            match event:
                case Start():
                    self._start(*event)
                case Arrive():
                    self._arrive(event)
                case Answer(now, worker):
                    self.deadlines.answered(worker, now if worker in self.tasks else None)
                case WorkerLeave():
                    self._leave(*event)
                case WorkerJoin():
                    self._join(*event)
        except Exception as error:
            story = "; ".join(map(_words, self._story)) or "nothing"
            error.add_note(f"{_words(event)} came to this parameter server after: {story}")
            raise
        finally:
            self._handling = outer
        self._story.append(event)

    def _start(self, now: float, workers: frozenset[int] | None) -> None:
        self.present = set(range(self.workers)) if workers is None else set(workers)
        self._updated_at = now
        effects, self._state = self._gate.init()
        for worker in range(self.workers):
            if worker not in self.present:
                _, self._state = self._gate.leave(self._state, worker, now)
        self._expect(now)
        self._carry_out(effects, now)

    def _arrive(self, event: Arrive) -> None:
        now, worker, number, seconds, ran, ends = event
        task = self.tasks.get(worker)
        if task is None or task.number != number:
            self._dropped["given up"] += 1
            return
        del self.tasks[worker]
        whole = now - task.began
        if ends is not None and len(ends) < task.pieces:
            task, ends = self._cut(task, ends)
        trip = Trip(whole if seconds is None else seconds, whole, task.load)
        if ran is not None:
            task = task._replace(taken=ran.taken, load=len(ran.taken))
            trip = Trip(ran.seconds, ran.seconds, task.load, ran)
        self.deadlines.arrived(worker, trip)
        self._quorum.arrivals.arrived(worker, task.tag, now, whole, np.zeros(0) if ends is None else ends)
        self._held.setdefault((worker, task.tag), []).append((task, trip.seconds))
        effects, self._state = self._gate.arrive(self._state, worker, now)
        self._carry_out(effects, now)

    def _leave(self, now: float, worker: int, why: str) -> None:
        if worker not in self.present:
            return
        _log.info("worker %d no longer takes part: %s", worker, why)
        self._changed.append(f"worker {worker} {WORDS.get(why, why)}")
        self.present.discard(worker)
        self._starved.discard(worker)
        self.deadlines.answered(worker, None)
        self._forget(worker, why)
        effects, self._state = self._gate.leave(self._state, worker, now)
        self._carry_out(effects, now)

    def _join(self, now: float, worker: int, late: Task | None) -> None:
        if worker >= self.workers:
            raise PacelineError(f"worker {worker}: expected a place below {self.workers}")
        _log.info("worker %d takes part", worker)
        self._changed.append(f"worker {worker} joined")
        self.present.add(worker)
        self.deadlines.joined(worker, None if late is None else (now - late.began) / max(late.load, 1))
        effects, self._state = self._gate.join(self._state, worker, now)
        self._carry_out(effects, now)

    def due(self, factor: float, grace: float) -> dict[int, float]:
        """The time (seconds) at which to give up each worker that is computing: see ``Deadlines.of``."""
        return self.deadlines.of({w: task.load for w, task in self.tasks.items()}, factor, grace)

    def _forget(self, worker: int, why: str) -> None:
        task = self.tasks.pop(worker, None)
        if task is not None:
            self.engine.cancel([task])
            self._lost(task, why)

    def _cut(self, task: Task, ends: Array) -> tuple[Task, Array]:
        """The part of a task that was run, which is its first pieces, and all ends, with NaN for the other pieces."""
        ran, left = np.split(task.taken, [int(task.ends()[len(ends) - 1])])
        self.pool.give_back(left)
        self._dropped["cut short"] += 1
        self._dropped_samples += len(left)
        missing = np.full(task.pieces - len(ends), np.nan)
        return task._replace(taken=ran, load=len(ran)), np.append(ends, missing)

    def _lost(self, task: Task, why: str) -> None:
        self._dropped[why] += 1
        if not task.shared:
            self.pool.give_back(task.taken)
            self._dropped_samples += task.load

    def _carry_out(self, effects: Effects, now: float) -> None:
        """Carry out the gate's effects, and the effects that result from them, in order."""
        queue = list(effects)
        while queue or (self._starved and self.pool.available()):
            if not queue:  # samples have come back for workers without any
                worker = min(self._starved)
                self._starved.discard(worker)
                effects, self._state = self._gate.join(self._state, worker, now)
                queue += effects
                continue
            effect = queue.pop(0)
            if isinstance(effect, Apply):
                self._apply(effect, now)
            elif isinstance(effect, Drop):
                task, _ = self._held_task(effect.gradient)
                self.engine.cancel([task])
                self._lost(task, "late")
            elif isinstance(effect, Interrupt):
                for worker in effect.workers:
                    self._forget(worker, "interrupted")
            else:
                for worker in sorted(self.present.intersection(effect.workers)):
                    queue += self._release(worker, effect.version, effect.tag, now)

    def _rates(self) -> Array:
        known = self._noise.norm2, self._noise.variance
        return np.array([self._rate.of(k, *known) for k in range(1, self.workers + 1)])

    def _apply(self, effect: Apply, now: float) -> None:
        used = [(g, *self._held_task(g)) for g in effect.gradients]
        used.sort(key=lambda item: (item[0].worker, item[1].number))  # sums must not depend on arrival order
        fresh = sum(g.version == self.version for g, _, _ in used) or len(used)
        batch = None if effect.scale == "mean" else float(self.batch)
        # Gradients have different numbers of samples. Divided by the whole batch, they already count by these.
        worth = self.workers * (sum(task.load for _, task, _ in used) / self.batch if batch is None else 1.0)
        rate = self._rate.of(min(worth, self.workers), self._noise.norm2, self._noise.variance)
        moved = self.engine.update([(task, g.weight) for g, task, _ in used if task.load], batch, rate)
        staleness = [self.version - g.version for g, _, _ in used]
        self.version += 1
        loads, compute = np.zeros(self.workers, np.int64), np.full(self.workers, np.nan)
        for _, task, seconds in used:
            self.pool.used(task.taken)
            loads[task.worker] += task.load
            compute[task.worker] = seconds + np.nan_to_num(compute[task.worker])
        self._noise.updated(moved.norm2, moved.variance, len(used))
        wanted = self._quorum.wanted
        self._quorum.updated(self.version, now, fresh, len(self.present), moved, rate)
        noise_scale = self._noise.scale(loads.sum() / len(used)) if self._gate.takes_quorum else None
        shares = self._loads.updated(self.version, self.present, self.deadlines, noise_scale)
        self._quorum.planned(self.balancer.plan(self.version).quorum, len(self.present))
        self._expect(now)
        update = Update(
            step=self.version - 1,
            batch=int(loads.sum()),
            ended=now,
            seconds=now - self._updated_at,
            quorum=fresh,
            wanted=wanted,
            present=len(self.present),
            loss=moved.loss,
            rate=rate,
            norm2=moved.norm2,
            variance=moved.variance,
            loads=loads,
            compute=compute,
            overhead=np.full(self.workers, np.nan),
            staleness=staleness,
            dropped=self._dropped,
            dropped_samples=self._dropped_samples,
            shares=shares,
            moved=[task for _, task, _ in used],
            changed=self._changed,
        )
        self._updated_at, self._dropped, self._dropped_samples, self._changed = now, Counter(), 0, []
        self._on_update(update)

    def _expect(self, now: float) -> None:
        """Pass the wanted number of gradients to the gate, unless the gate itself decides on it."""
        if self._quorum.chosen:
            _, self._state = self._gate.expect(self._state, self._quorum.wanted, now)

    def _held_task(self, gradient: Gradient) -> tuple[Task, float]:
        held = self._held[gradient.worker, gradient.version]
        found = held.pop(0)
        if not held:
            del self._held[gradient.worker, gradient.version]
        return found

    def _release(self, worker: int, version: int, tag: int, now: float) -> Effects:
        """Give a worker its next task; without samples for it, the gate must not wait for it."""
        taken = self.pool.take(worker, self._loads.of(worker, self.version, self.present))
        if taken is None:
            self._starved.add(worker)
            effects, self._state = self._gate.leave(self._state, worker, now)
            return effects
        self._starved.discard(worker)
        load, (pieces, cut) = len(taken), self._quorum.cut
        task = Task(self._numbers, worker, version, tag, taken, load, now, self._shares, pieces, cut)
        self._numbers += 1
        self.tasks[worker] = task
        self.deadlines.sent(worker, now)
        self.engine.compute(task)
        return ()


def _words(event: Event) -> str:
    """A short description of the event, without samples."""
    parts = ", ".join(str(part) for part in event[1:] if isinstance(part, int | str))
    name = type(event).__name__.removeprefix("Worker").lower()
    return f"at {event.now:.3f} s {name} {parts}".rstrip()


class Loads:
    """Reports the workers' round trips to the balancer, and gets each version's loads from it. shares: whether rounds
    are run in pieces, and a lost worker leaves its samples to the others."""

    def __init__(self, balancer: Balancer, shares: bool) -> None:
        self._balancer, self._shares, cluster = balancer, shares, balancer.policy.cluster
        self._workers, self._batch = cluster.workers, cluster.global_batch
        # What a worker gets that the plan did not expect: least loads of 2 or more may be there for batch norm.
        self._least = np.clip(cluster.least, 1, 2).astype(np.int64)
        self._of = (-1, np.zeros(self._workers, np.int64))  # a version and its loads
        self._seen: dict[int, Trip | None] = {}  # the round trips that were reported last

    def of(self, worker: int, version: int, present: Collection[int]) -> int:
        """The number of samples of the worker's task at this version.

        At least 1, since a gradient needs samples, or 2, see ``_least``; but a worker that joins a shared round when
        all its samples are handed out gets 0, and helps the others. present: the workers that take part, including
        this one."""
        if self._of[0] != version:
            self._of = version, self._planned(version, present)
        load = int(self._of[1][worker])
        if self._shares:
            self._of[1][worker] = 0
            return load
        return max(int(self._least[worker]), load)

    def updated(
        self, version: int, present: Iterable[int], trips: Deadlines, noise_scale: float | None
    ) -> Array:
        """Report the newest round trips of all present workers to the balancing policy; returns its shares, (n,)."""
        loads, seconds = np.zeros(self._workers, np.int64), np.full(self._workers, np.nan)
        overhead, pieces = np.zeros(self._workers), np.full((4, self._workers), np.nan)
        newest = {worker: trips.newest(worker) for worker in present}
        for worker, trip in newest.items():
            if trip is None:
                break
            seconds[worker], loads[worker] = trip.seconds, trip.load
            if trip.ran is not None:
                overhead[worker], pieces[:, worker] = trip.ran.overhead, trip.ran.figures()
        if None in newest.values() or not loads.any():
            return np.array(self._balancer.loads(version, self._batch), float) / self._batch
        known = PieceTimes(*pieces) if np.isfinite(pieces).any() else None
        late = np.array(
            [worker in newest and newest[worker] is self._seen.get(worker) for worker in range(len(loads))]
        )
        self._seen = newest
        noise = Gradients(np.nan if noise_scale is None else noise_scale, late)
        return self._balancer.report(version - 1, loads, seconds, overhead, pieces=known, gradients=noise)[1]

    def _planned(self, version: int, present: Collection[int]) -> NDArray[np.int64]:
        """The version's loads: a whole batch, or what the present workers' limits allow, with at least one sample for
        each of them, or two, see ``_least``. The plan may be older than the last leave or join."""
        there = np.zeros(self._workers, np.bool_)
        there[list(present)] = True
        room, least = self._balancer.policy.cluster.most[there].sum(), self._least
        loads = self._balancer.loads(version, int(min(self._batch, room)), present=there)
        for worker in np.flatnonzero(there & (loads == 0)):
            largest = np.argmax(loads)
            if loads[largest] - least[worker] >= least[largest]:
                loads[largest] -= least[worker]
                loads[worker] = least[worker]
        return loads


class Quorum:
    """Reports updates to the backup policy, and keeps the wanted quorum. backup: None if only the gate decides.

    rates: the learning rates of an update from 1..n gradients, as they are now, (n,).
    """

    def __init__(self, backup: Backup[Any] | None, workers: int, rates: Callable[[], Array]) -> None:
        self._backup, self.arrivals, self._rates = backup, Arrivals(workers), rates
        self.wanted = workers
        self._state: Any = None
        self._planned = False
        if backup is not None:
            self.wanted, self._state = backup.init()

    @property
    def chosen(self) -> bool:
        """Whether the wanted quorum is passed to the gate."""
        return self._backup is not None or self._planned

    @property
    def cut(self) -> tuple[int, float]:
        """Pieces of a task, 0 for whole tasks, and the seconds after which no more of them begin."""
        return (0, np.inf) if self._backup is None else (self._backup.pieces, self._backup.cut(self._state))

    def updated(self, version: int, now: float, fresh: int, present: int, moved: Moved, rate: float) -> None:
        """Note an update to this version, from ``fresh`` gradients of the version before, with this learning rate."""
        timings = self.arrivals.updated(version, now, fresh)
        if self._backup is not None:
            measured = moved.loss, moved.norm2, moved.variance
            happened = Iteration(fresh, present, now, *measured, rate, timings, self._rates())
            self.wanted, self._state = self._backup.step(self._state, happened)

    def planned(self, quorum: int | None, present: int) -> None:
        """Note the quorum in the balancing policy's plan; a backup policy's quorum has precedence."""
        if self._backup is None and (self._planned or quorum is not None):
            self.wanted, self._planned = quorum or present, True
