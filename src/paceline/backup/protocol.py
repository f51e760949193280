"""The data that a backup policy gets after each update, their recorder, and the protocol of backup policies."""

from __future__ import annotations

from typing import ClassVar, NamedTuple, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from paceline.rounds import Array

S = TypeVar("S")


class Timings(NamedTuple):
    """The m arrivals of gradients since the last decision; arrays of shape (m,).

    Attributes:
        before: Gradients for which the update to the measured version had waited (h).
        place: 1 for the first gradient of its version to arrive, 2 for the second, ... (i).
        seconds: From the update to the arrival (t_{h,i}).
        trip: Seconds of the worker's own round trip.
        worker: Its rank.
        ends: When each of its pieces was done, seconds from its beginning, NaN for dropped ones; (m, pieces).
    """

    before: NDArray[np.int64]
    place: NDArray[np.int64]
    seconds: Array
    worker: NDArray[np.int64]
    trip: Array
    ends: Array = np.zeros((0, 0))


class Iteration(NamedTuple):
    """One update of the parameters.

    Attributes:
        quorum: Gradients in it (k_t).
        present: Number of workers present now.
        now: Time of the update, in seconds.
        loss: Mean over the gradients' samples, at the parameters before the update.
        norm2: Squared norm of the aggregated gradient.
        variance: Unbiased estimate of the summed variance of one gradient's components; NaN from one gradient.
        rate: Learning rate of the update.
        timings: The gradients that arrived since the last decision.
        rates: Learning rates that the next update would have from 1..n gradients, (n,); None if they are all
            ``rate``.
    """

    quorum: int
    present: int
    now: float
    loss: float
    norm2: float
    variance: float
    rate: float
    timings: Timings
    rates: Array | None = None


class Backup(Protocol[S]):
    """Decides how many gradients an update waits for. Frozen: all that changes is in the state.

    Attributes:
        workers: Number of workers, n.
        needs_variance: Whether it reads ``Iteration.variance``, for which all gradients are read once more.
        pieces: Pieces in which a task runs, until ``cut``; 0 for whole tasks.
    """

    workers: int
    needs_variance: ClassVar[bool] = False
    pieces: int = 0

    def init(self) -> tuple[int, S]:
        """Begin a run.

        Returns:
            The first quorum, and the state to pass to ``step``.
        """
        ...

    def step(self, state: S, happened: Iteration) -> tuple[int, S]:
        """Decide how many gradients the next update waits for.

        Args:
            state: As the step before returned it.
            happened: The iteration that has just ended.

        Returns:
            The next quorum, from 1 to ``happened.present``, and the next state.
        """
        ...

    def cut(self, state: S) -> float:
        """When a worker stops beginning pieces of its task.

        Args:
            state: As the newest step returned it.

        Returns:
            Seconds from the beginning of the task; infinite to run all of it.
        """
        return np.inf


class Arrivals:
    """Records an engine's events as ``Timings``: call it for each update and each gradient, late ones included.

    Versions older than the newest by more than four times the number of workers are forgotten.
    """

    def __init__(self, workers: int) -> None:
        self._workers = workers
        self._versions = {0: (0.0, workers, 0)}  # time of the update, h, number of arrivals
        self._samples: list[tuple[int, int, float, int, float]] = []
        self._ends: list[Array] = []

    def updated(self, version: int, now: float, quorum: int) -> Timings:
        """The parameters became ``version`` at ``now`` (seconds), from ``quorum`` gradients. Returns the arrivals
        since the update before."""
        self._versions[version] = (now, quorum, 0)
        for old in [v for v in self._versions if v < version - 4 * self._workers]:
            del self._versions[old]
        taken, ends, self._samples, self._ends = self._samples, self._ends, [], []
        columns = np.array(taken, float).reshape(-1, 5).T
        before, place, worker = (columns[i].astype(np.int64) for i in (0, 1, 3))
        return Timings(before, place, columns[2], worker, columns[4], np.array(ends or np.zeros((0, 0))))

    def arrived(
        self,
        worker: int,
        version: int,
        now: float,
        trip: float,
        ends: Array = np.zeros(0),  # noqa: B008  # read only
    ) -> None:
        """A gradient for ``version`` arrived at ``now``; the worker's round trip took ``trip`` seconds, and its
        pieces were done at ``ends``."""
        if version not in self._versions:
            return
        made, quorum, count = self._versions[version]
        self._versions[version] = (made, quorum, count + 1)
        self._samples.append((quorum, count + 1, now - made, worker, trip))
        self._ends.append(ends)
