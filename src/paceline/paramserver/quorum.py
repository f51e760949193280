"""How many gradients an update waits for, as the backup policy has it."""

from __future__ import annotations

from typing import Any

from paceline.backup import Backup, Iteration
from paceline.backup.protocol import Arrivals
from paceline.paramserver.engine import Moved


class Quorum:
    """Shows the backup policy what came of each update, and keeps what it asks for.

    backup: None where the gate alone decides.
    """

    def __init__(self, backup: Backup[Any] | None, workers: int) -> None:
        self._backup, self._arrivals = backup, Arrivals(workers)
        self.wanted = workers
        self._state: Any = None
        if backup is not None:
            self.wanted, self._state = backup.init()

    @property
    def chosen(self) -> bool:
        """Whether the gate is to be told what is wanted."""
        return self._backup is not None

    def arrived(self, worker: int, tag: int, now: float, seconds: float) -> None:
        """A gradient is here that counts for version ``tag``, after so many seconds."""
        self._arrivals.arrived(worker, tag, now, seconds)

    def updated(self, version: int, now: float, fresh: int, present: int, moved: Moved, rate: float) -> None:
        """The parameters moved, now to this version, by ``fresh`` gradients of the one before, at this rate."""
        self._arrivals.updated(version, now, fresh)
        timings = self._arrivals.take()
        if self._backup is not None:
            happened = Iteration(fresh, present, now, moved.loss, moved.norm2, moved.variance, rate, timings)
            self.wanted, self._state = self._backup.step(self._state, happened)
