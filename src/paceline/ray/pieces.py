"""Carries out rounds in pieces: sends pieces to workers, and takes their reports and gradients."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from paceline.paramserver.coordinator import Coordinator
from paceline.paramserver.engine import Arrive, Task
from paceline.pieces.sharing import SharedRound
from paceline.ray.shards import Arrived
from paceline.rounds import Indices, PieceRecord

FIRST_COST = 2e-3  # seconds of a piece beyond those of its samples, before it is measured


class Pieces:
    """The current round. ``due`` is the latest time of the next call of ``claim``.

    sender: sends to the workers, as ``Server`` does: ``send`` lets a task's worker add the gradient of samples to its
    sum for the round, and ``ask`` lets it deliver that sum after the pieces that were sent before.
    """

    def __init__(self, sender: Any, coordinator: Coordinator) -> None:
        self._sender, self._coordinator = sender, coordinator
        self._costs = np.full(coordinator.workers, FIRST_COST)
        self._sharing: SharedRound | None = None
        self._version = -1
        self._tasks: dict[int, Task] = {}
        self._portions: dict[int, list[Arrived]] = {}  # by worker
        self._number = 0  # of portions, negative, so that it differs from the numbers of tasks
        self.record: PieceRecord | None = None  # the record of the newest complete round

    def begin(self, task: Task, now: float) -> None:
        """Let a worker take part in the round; its task's samples are its plan."""
        if self._sharing is None or self._version != task.version:
            piece_plan = self._coordinator.balancer.piece_plan(task.version)
            assert piece_plan is not None
            self._sharing, self._version, self._tasks = SharedRound(piece_plan, self._costs), task.version, {}
            self._portions = {}
        self._tasks[task.worker] = task
        self._send(task.worker, self._sharing.begin(task.worker, task.taken, now))

    def lose(self, worker: int, now: float) -> None:
        """Note that the worker is lost; the others run its samples."""
        self._tasks.pop(worker, None)
        self._portions.pop(worker, None)
        if self._sharing is not None:
            self._sharing.lose(worker)
            self.claim(now)

    def reported(self, worker: int, now: float) -> None:
        """Note that the worker has run a piece."""
        if self._sharing is not None and not self._sharing.idle(worker):
            self._sharing.reported(worker, now)
            self.claim(now)

    def delivered(self, task: Task, refs: list[Any], loss: float, kept: Any, now: float) -> Arrived:
        """Note a gradient that has arrived; returns it with its number, for ``Shards.hold``."""
        assert self._sharing is not None
        self._number -= 1
        arrived = Arrived(self._number, task.load, 1.0, refs, loss, kept)
        self._portions.setdefault(task.worker, []).append(arrived)
        self._sharing.delivered(task.worker, task.taken, now)
        return arrived

    def portions(self) -> list[Arrived]:
        """All gradients of the round, for its update, by worker."""
        return [portion for worker in sorted(self._portions) for portion in self._portions[worker]]

    def due(self) -> float:
        """The time at which the next worker should claim ahead; infinity if none should."""
        if self._sharing is None:
            return math.inf
        ends = [self._sharing.expected(worker) for worker in self._sharing.workers()]
        return min((end for end in ends if end is not None), default=math.inf)

    def claim(self, now: float) -> None:
        """Send the next piece to each worker that is idle, or will soon be done with its only piece. If none is left,
        let the workers deliver. The deadlines get the samples that are awaited from each worker, and since when."""
        sharing = self._sharing
        if sharing is None:
            return
        for worker in sharing.workers():
            end = sharing.expected(worker)
            if sharing.idle(worker) or (end is not None and end <= now):
                self._send(worker, sharing.claim(worker, now))
        for worker in sharing.workers():
            samples = sharing.to_deliver(worker)
            if samples is not None:
                self._sender.ask(self._tasks[worker]._replace(taken=samples, load=len(samples)))
            self._coordinator.deadlines.progress(worker, *sharing.awaited(worker))

    def finish(self, now: float) -> None:
        """Report the round to the coordinator if it is complete; the coordinator then begins the next one."""
        sharing = self._sharing
        if sharing is None or not sharing.complete():
            return
        self._sharing = None
        ran = sharing.end()
        self.record = sharing.record(ran)
        for worker in sharing.workers():
            self._coordinator.handle(Arrive(now, worker, self._tasks[worker].number, ran=ran[worker]))

    def _send(self, worker: int, samples: Indices | None) -> None:
        if samples is not None:
            self._sender.send(self._tasks[worker], samples)
