"""The events that ``Coordinator.handle`` takes, the engine's interface, and an update's result. Times are seconds."""

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
    version: int  # of the parameters on which it is computed
    tag: int  # the version for which it counts
    taken: Indices  # its samples
    load: int
    began: float  # seconds
    shared: bool = False  # whether any free worker may run its samples, which belong to the round
    pieces: int = 0  # in which it is run until ``cut`` seconds are over; 0 to run it whole
    cut: float = np.inf

    def ends(self) -> NDArray[np.int64]:
        """The samples up to the end of each piece, for pieces of nearly equal size; shape (pieces,)."""
        return -(-np.arange(1, self.pieces + 1) * self.load // self.pieces)


class Start(NamedTuple):
    """The run begins. workers: those that are present, all by default."""

    now: float
    workers: frozenset[int] | None = None


class Arrive(NamedTuple):
    """The gradient of task ``number`` has arrived. It is not used if its worker was given up meanwhile.

    seconds: of the computation, by default the round trip. ran: the worker's actual part of a shared round.
    ends: seconds after which each of the task's pieces was done, if it was run in pieces.
    """

    now: float
    worker: int
    number: int
    seconds: float | None = None
    ran: WorkerRound | None = None
    ends: Array | None = None


class Answer(NamedTuple):
    """The worker has answered a task that was cancelled."""

    now: float
    worker: int


class WorkerLeave(NamedTuple):
    """The worker has left or is lost; the samples of its task go to the others."""

    now: float
    worker: int
    why: str = "left"


class WorkerJoin(NamedTuple):
    """The worker joins (again), and gets the newest parameters.

    late: the task with which it was given up and which has ended by now; its duration raises the worker's deadline,
        so that a slow worker, but no frozen one, is waited for in the end.
    """

    now: float
    worker: int
    late: Task | None = None


Event = Start | Arrive | Answer | WorkerLeave | WorkerJoin


class Moved(NamedTuple):
    """The results of an update, from the engine."""

    loss: float
    norm2: float
    variance: float


class Engine(Protocol):
    """Carries out the coordinator's decisions."""

    def compute(self, task: Task) -> None:
        """Let the worker compute this gradient at the newest parameters."""

    def cancel(self, tasks: list[Task]) -> None:
        """Stop computing these gradients if possible; they will not be used, even if they are finished."""

    def update(self, parts: list[tuple[Task, float]], batch: float | None, rate: float) -> Moved:
        """Move the parameters with these gradients and weights; batch as in ``aggregate``."""


@dataclass(kw_only=True, eq=False)
class Update(RoundResult):
    """One update of a parameter server. Samples are those of the gradients that were used, and seconds those of their
    round trips."""

    quorum: int  # gradients of the newest version, or in the group
    wanted: int  # the quorum that the backup policy wanted
    present: int
    rate: float
    norm2: float
    variance: float
    staleness: list[int]  # of each gradient used
    dropped: Counter[str]  # gradients since the last update, by the reason
    dropped_samples: int
    moved: list[Task] = field(default_factory=list)
    changed: list[str] = field(default_factory=list)  # workers lost, left or joined since the last update

    @property
    def version(self) -> int:
        """The number of updates, including this one."""
        return self.step + 1
