"""How long to wait for each worker of a parameter server, from the round trips measured so far."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from paceline.pieces.sharing import WorkerRound

RECENT = 8  # round trips of a worker from which its deadline is made
AGAIN = 1.5  # times what it took, given up, to a worker that is back


class Trip(NamedTuple):
    """One finished task: seconds of the computation and of the whole round trip, and its samples."""

    seconds: float
    whole: float
    load: int
    ran: WorkerRound | None = None  # in a shared round


class Deadlines:
    """When each worker was last heard of, and how long its tasks take; times are seconds of the caller's clock."""

    def __init__(self) -> None:
        self._trips: dict[int, list[Trip]] = {}  # the most recent ones of each worker
        self._unheard: dict[int, float] = {}  # since when each worker has not answered
        self._awaited: dict[int, int] = {}  # in a shared round: samples sent and not delivered
        self._late: dict[int, float] = {}  # seconds a sample of what it was given up with

    def sent(self, worker: int, now: float) -> None:
        """The worker got a task; it may have others that it has not answered to."""
        self._unheard.setdefault(worker, now)

    def heard(self, worker: int, now: float | None) -> None:
        """The worker has answered. now: None if nothing more is awaited from it."""
        if now is None:
            self._unheard.pop(worker, None)
            self._awaited.pop(worker, None)
        else:
            self._unheard[worker] = now

    def progress(self, worker: int, heard: float, load: int) -> None:
        """The worker was last heard of then, and so many samples are awaited from it."""
        self._unheard[worker], self._awaited[worker] = heard, load

    def arrived(self, worker: int, trip: Trip) -> None:
        """The worker's task is here."""
        self.heard(worker, None)
        self._late.pop(worker, None)
        if trip.load:
            self._trips.setdefault(worker, []).append(trip)
            del self._trips[worker][:-RECENT]

    def joined(self, worker: int, late: float | None) -> None:
        """The worker is there (again). late: seconds a sample of the task that it was given up with."""
        self._trips.pop(worker, None)
        self._late[worker] = late or 0.0

    def newest(self, worker: int) -> Trip | None:
        """The worker's newest round trip, None while there is none."""
        return self._trips[worker][-1] if worker in self._trips else None

    def of(self, loads: Mapping[int, int], factor: float, floor: float) -> dict[int, float]:
        """When to give up each worker that has a task; loads: the samples of these.

        Since it last answered, or got its task where it has answered to all before, a worker may take ``factor``
        times the longest of the recent round trips, its own or its peers' median longest, in proportion to its
        load, and ``floor`` seconds more; one that was given up and came back ``AGAIN`` times what it took then,
        until it delivers. Workers are left out as long as nothing is measured, unless ``factor`` is 0.
        """
        longest = {w: max(trip.whole / trip.load for trip in trips) for w, trips in self._trips.items()}
        if not longest and factor:
            return {}
        typical = float(np.median(list(longest.values()))) if longest else 0.0
        found = {}
        for worker, planned in loads.items():
            load = self._awaited.get(worker, planned)
            own, late = factor * longest.get(worker, 0.0), AGAIN * self._late.get(worker, 0.0)
            if load:
                found[worker] = self._unheard[worker] + floor + load * max(own, factor * typical, late)
        return found
