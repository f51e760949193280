"""How many samples each worker's tasks have, as the balancer has it."""

from __future__ import annotations

from collections.abc import Collection, Iterable

import numpy as np
from numpy.typing import NDArray

from paceline.balancer import Balancer
from paceline.paramserver.deadlines import Deadlines
from paceline.rounds import Array, PieceTimes


class Loads:
    """Shows the balancer what the workers' round trips took, and asks it for each version's loads.

    workers: n. batch: samples that a full round of all workers has. shares: a round is run in pieces, and who is
        lost leaves its samples to the others.
    """

    def __init__(self, balancer: Balancer, workers: int, batch: int, shares: bool = False) -> None:
        self._balancer, self._workers, self._batch, self._shares = balancer, workers, batch, shares
        self._of = (-1, np.zeros(workers, np.int64))  # whose version, samples each

    def of(self, worker: int, version: int, present: Collection[int]) -> int:
        """Samples of a task that the worker gets at this version.

        At least 1, as there is no gradient of none; but who comes into a shared round when all of it is handed out
        already gets 0, and helps with what the others have. present: who takes part, the worker among them."""
        if self._of[0] != version:
            self._of = version, self._planned(version, present)
        load = int(self._of[1][worker])
        if self._shares:
            self._of[1][worker] = 0
            return load
        return max(1, load)

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

    def _planned(self, version: int, present: Collection[int]) -> NDArray[np.int64]:
        """The version's loads: a whole batch, or as much as those present have room for, and a sample at least for
        each of them. The plan may be from before the last one left or came back."""
        there = np.zeros(self._workers, np.bool_)
        there[list(present)] = True
        room = self._balancer.policy.cluster.most[there].sum()
        loads = self._balancer.loads(version, int(min(self._batch, room)), present=there)
        for worker in np.flatnonzero(there & (loads == 0)):
            if loads.max() > 1:
                loads[np.argmax(loads)] -= 1
                loads[worker] = 1
        return loads
