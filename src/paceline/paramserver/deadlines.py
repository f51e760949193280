"""How long to wait for each worker of a parameter server, from the round trips measured so far."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from paceline.pieces.sharing import WorkerRound

RECENT = 8  # round trips of a worker that determine its deadline
AGAIN = 1.5  # times the duration of the task with which a worker was given up, when it is back


class Trip(NamedTuple):
    """One finished task: seconds of the computation and of the whole round trip, and its samples."""

    seconds: float
    whole: float
    load: int
    ran: WorkerRound | None = None  # in a shared round


class Deadlines:
    """The time of each worker's last answer, and how long its tasks take; times are seconds of the caller's clock."""

    def __init__(self) -> None:
        self._trips: dict[int, list[Trip]] = {}  # the most recent ones of each worker
        self._silent: dict[int, float] = {}  # the time since which each worker has not answered
        self._awaited: dict[int, int] = {}  # in a shared round: samples sent and not delivered
        self._late: dict[int, float] = {}  # seconds per sample of the task with which it was given up

    def sent(self, worker: int, now: float) -> None:
        """Note that the worker got a task; earlier ones may be unanswered."""
        self._silent.setdefault(worker, now)

    def answered(self, worker: int, now: float | None) -> None:
        """Note an answer of the worker. now: None if no other answer is awaited."""
        if now is None:
            self._silent.pop(worker, None)
            self._awaited.pop(worker, None)
        else:
            self._silent[worker] = now

    def progress(self, worker: int, since: float, load: int) -> None:
        """Note the time of the worker's last answer, and the number of samples that are awaited from it."""
        self._silent[worker], self._awaited[worker] = since, load

    def arrived(self, worker: int, trip: Trip) -> None:
        """Note that the worker's task has arrived."""
        self.answered(worker, None)
        self._late.pop(worker, None)
        if trip.load:
            self._trips.setdefault(worker, []).append(trip)
            del self._trips[worker][:-RECENT]

    def joined(self, worker: int, late: float | None) -> None:
        """Note that the worker joined. late: seconds per sample of the task with which it was given up."""
        self._trips.pop(worker, None)
        self._late[worker] = late or 0.0

    def newest(self, worker: int) -> Trip | None:
        """The worker's newest round trip, None if there is none yet."""
        return self._trips[worker][-1] if worker in self._trips else None

    def of(self, loads: Mapping[int, int], factor: float, grace: float) -> dict[int, float]:
        """The time at which to give up each worker that has a task. loads: the samples of these tasks.

        After its last answer, or after it got its task if it has answered all earlier ones, a worker may take
        ``factor`` times the longest recent round trip (its own, or the median of its peers' longest) in proportion to
        its load, plus ``grace`` seconds; a worker that was given up and came back may take ``AGAIN`` times as long as
        that task took until it delivers. The result is empty before anything is measured, unless ``factor`` is 0.
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
                found[worker] = self._silent[worker] + grace + load * max(own, factor * typical, late)
        return found
