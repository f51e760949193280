"""What happens to a parameter server, what its engine does for it, and what comes of that. Times are seconds.

What happens enters by ``Coordinator.handle``.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from paceline.pieces.sharing import WorkerRound
from paceline.rounds import Array, Indices, RoundResult


class Task(NamedTuple):
    """One gradient to compute."""

    number: int
    worker: int
    version: int  # of the parameters it is computed on
    tag: int  # the version it counts for
    taken: Indices  # its samples
    load: int
    began: float  # seconds
    shared: bool = False  # its samples are the round's: whoever is free runs them
    pieces: int = 0  # to run it in, as long as ``cut`` seconds are not over; 0 for whole
    cut: float = np.inf

    def ends(self) -> NDArray[np.int64]:
        """Its samples up to the end of each of its pieces, which are as equal as they can be; (pieces,)."""
        return -(-np.arange(1, self.pieces + 1) * self.load // self.pieces)


class Start(NamedTuple):
    """Everybody begins. workers: who is there, all if not given."""

    now: float
    workers: frozenset[int] | None = None


class Arrive(NamedTuple):
    """The gradient of task ``number`` is here. Where its worker was given up meanwhile, it is of no use.

    seconds: of the computation, the round trip by default. ran: what the worker really did of a shared round.
    ends: seconds after which each of the task's pieces was done, as far as it was run in pieces.
    """

    now: float
    worker: int
    number: int
    seconds: float | None = None
    ran: WorkerRound | None = None
    ends: Array | None = None


class Answer(NamedTuple):
    """The worker has answered to a task that it was told to leave undone."""

    now: float
    worker: int


class Leave(NamedTuple):
    """The worker is gone; what it was computing goes to the others."""

    now: float
    worker: int
    why: str = "left"


class Join(NamedTuple):
    """The worker is there (again), and gets the newest parameters.

    late: the task that it was given up with and has ended by now; how long that took bears on its deadline, so that
        who is slow, not frozen, is waited for in the end.
    """

    now: float
    worker: int
    late: Task | None = None


Event = Start | Arrive | Answer | Leave | Join


class Moved(NamedTuple):
    """What an engine knows after an update."""

    loss: float
    norm2: float
    variance: float


class Engine(Protocol):
    """Carries out what the coordinator decides."""

    def compute(self, task: Task) -> None:
        """Have the worker compute this gradient at the newest parameters."""

    def cancel(self, tasks: list[Task]) -> None:
        """These gradients, finished or not, will not be used; stop computing them where that is possible."""

    def update(self, parts: list[tuple[Task, float]], batch: float | None, rate: float) -> Moved:
        """Move the parameters with these gradients and weights; batch as in ``aggregate``."""


@dataclass(kw_only=True, eq=False)
class Update(RoundResult):
    """One update of a parameter server. Samples are those whose gradients moved the parameters, and seconds those of
    the round trips used."""

    quorum: int  # gradients of the newest version, or in the group
    wanted: int  # the quorum that the backup policy asked for
    present: int
    rate: float
    norm2: float
    variance: float
    staleness: list[int]  # of each gradient used
    dropped: Counter[str]  # gradients since the update before, by what became of them
    dropped_samples: int
    moved: list[Task] = field(default_factory=list)
    changed: list[str] = field(default_factory=list)  # who was lost, left or joined since the one before

    @property
    def version(self) -> int:
        """Updates until then, this one included."""
        return self.step + 1
