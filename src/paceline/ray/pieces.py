"""Rounds in pieces, carried out: sends pieces to workers, and takes in what they report and deliver."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from paceline.paramserver.coordinator import Coordinator
from paceline.paramserver.engine import Arrive, Task
from paceline.pieces.sharing import SharedRound
from paceline.ray.shards import Arrived
from paceline.rounds import Indices, PieceRecord

FIRST_COST = 2e-3  # seconds of a piece beyond its samples, until measured


class Pieces:
    """The running round. ``due`` tells when ``claim`` is called next at the latest.

    sender: reaches the workers, as ``Server`` does: ``send`` has a task's worker add the gradient of some samples to
    what it has of the round, and ``ask`` has it deliver that after what it was sent.
    """

    def __init__(self, sender: Any, coordinator: Coordinator) -> None:
        self._sender, self._coordinator = sender, coordinator
        self._costs = np.full(coordinator.workers, FIRST_COST)
        self._sharing: SharedRound | None = None
        self._version = -1
        self._tasks: dict[int, Task] = {}
        self._portions: dict[int, list[Arrived]] = {}  # by worker
        self._number = 0  # of portions, counted downwards: apart from tasks
        self.record: PieceRecord | None = None  # of the newest complete round

    def begin(self, task: Task, now: float) -> None:
        """A worker takes part in the round, with its task's samples for its plan."""
        if self._sharing is None or self._version != task.version:
            piece_plan = self._coordinator.balancer.piece_plan(task.version)
            assert piece_plan is not None
            self._sharing, self._version, self._tasks = SharedRound(piece_plan, self._costs), task.version, {}
            self._portions = {}
        self._tasks[task.worker] = task
        self._send(task.worker, self._sharing.begin(task.worker, task.taken, now))

    def lose(self, worker: int, now: float) -> None:
        """The worker is gone; the others do what it had."""
        self._tasks.pop(worker, None)
        self._portions.pop(worker, None)
        if self._sharing is not None:
            self._sharing.lose(worker)
            self.claim(now)

    def reported(self, worker: int, now: float) -> None:
        """A piece is through."""
        if self._sharing is not None and not self._sharing.idle(worker):
            self._sharing.reported(worker, now)
            self.claim(now)

    def delivered(self, task: Task, refs: list[Any], loss: float, kept: Any, now: float) -> Arrived:
        """A gradient is here; what it is called among those that are added ahead."""
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
        """When somebody should claim ahead."""
        if self._sharing is None:
            return math.inf
        ends = [self._sharing.expected(worker) for worker in self._sharing.workers()]
        return min((end for end in ends if end is not None), default=math.inf)

    def claim(self, now: float) -> None:
        """Whoever has nothing to run, or will soon be through with its only piece, gets the next, so that it need not
        wait for it. Once nothing is left, everybody delivers at its end; who is awaited, since when, is said."""
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
        """Tell the coordinator of the round if it is complete; the coordinator goes on to the next."""
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
