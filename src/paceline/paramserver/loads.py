"""How many samples each worker's tasks have, as the balancer has it."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from paceline.balancer import Balancer
from paceline.paramserver.deadlines import Deadlines
from paceline.rounds import Array, PieceTimes


class Loads:
    """Shows the balancer what the workers' round trips took, and asks it for each version's loads.

    workers: n. batch: samples that a full round of all workers has.
    """

    def __init__(self, balancer: Balancer, workers: int, batch: int) -> None:
        self._balancer, self._workers, self._batch = balancer, workers, batch
        self._of = (-1, np.zeros(workers, np.int64))  # whose version, samples each

    def of(self, worker: int, version: int) -> int:
        """Samples of a task that the worker gets at this version."""
        if self._of[0] != version:
            self._of = version, self._balancer.loads(version, self._batch)
        return max(1, int(self._of[1][worker]))

    def updated(self, version: int, present: Iterable[int], trips: Deadlines) -> Array:
        """Let the balancing policy see the newest round trip of everybody present; the shares that it plans, (n,)."""
        loads, seconds = np.zeros(self._workers, np.int64), np.full(self._workers, np.nan)
        overhead, pieces = np.zeros(self._workers), np.full((3, self._workers), np.nan)
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
        return self._balancer.report(version - 1, loads, seconds, overhead, pieces=known)[1]
