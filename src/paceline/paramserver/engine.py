"""What an engine does for a coordinator, and what comes of it."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from paceline.paramserver.events import Task
from paceline.pieces.sharing import PieceRecord
from paceline.rounds import Array


class Moved(NamedTuple):
    """What an engine knows after an update."""

    loss: float
    norm2: float
    variance: float


class Engine(Protocol):
    """Carries out what the coordinator decides."""

    def compute(self, task: Task) -> None:
        """Have the worker compute this gradient at the newest parameters."""
        ...

    def cancel(self, tasks: list[Task]) -> None:
        """These gradients, finished or not, will not be used; stop computing them where that is possible."""
        ...

    def update(self, parts: list[tuple[Task, float]], batch: float | None, rate: float) -> Moved:
        """Move the parameters with these gradients and weights; batch as in ``aggregate``."""
        ...


@dataclass(kw_only=True)
class Update:
    """One update, for the record. Arrays have one entry a worker."""

    version: int  # after it
    now: float
    seconds: float  # since the one before
    quorum: int  # gradients of the newest version, or in the group
    wanted: int  # the quorum that the backup policy asked for
    present: int
    loss: float
    rate: float
    norm2: float
    variance: float
    loads: NDArray[np.int64]  # samples used
    compute: Array  # seconds of the round trips used; NaN where none
    staleness: list[int]  # of each gradient used
    dropped: Counter[str]  # gradients since the update before, by what became of them
    dropped_samples: int
    shares: Array
    moved: list[Task] = field(default_factory=list)
    within: PieceRecord | None = None  # its pieces, where work moves within the round
    changed: list[str] = field(default_factory=list)  # who was lost, left or joined since the one before

    @property
    def samples(self) -> int:
        """Samples whose gradients moved the parameters."""
        return int(self.loads.sum())
