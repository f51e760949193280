"""What a backup policy is told after each update, and the protocol it follows."""

from __future__ import annotations

from typing import ClassVar, NamedTuple, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from paceline.rounds import Array

S = TypeVar("S")


class Timings(NamedTuple):
    """Arrivals since the last decision, each of shape (m,).

    before: gradients that the update before the measured version had waited for (h).
    place: 1 for the first gradient of its version to arrive, 2 for the second, ... (i).
    seconds: from the update to the arrival (t_{h,i}); seconds of the worker's own round trip in trip.
    worker: who.
    """

    before: NDArray[np.int64]
    place: NDArray[np.int64]
    seconds: Array
    worker: NDArray[np.int64]
    trip: Array


class Iteration(NamedTuple):
    """One update of the parameters.

    quorum: gradients that entered it (k_t). present: workers that are there now. now: seconds.
    loss: mean over the gradients' samples, at the parameters before the update.
    norm2: squared norm of the aggregated gradient.
    variance: unbiased estimate of the summed variance of one gradient's components; NaN from one gradient.
    rate: learning rate of the update.
    """

    quorum: int
    present: int
    now: float
    loss: float
    norm2: float
    variance: float
    rate: float
    timings: Timings


class Backup(Protocol[S]):
    """Decides how many gradients an update waits for. Frozen: what changes lives in the state."""

    workers: int
    needs_variance: ClassVar[bool] = (
        False  # reads Iteration.variance, which costs reading all gradients once more
    )

    def init(self) -> tuple[int, S]:
        """The first quorum, and the state to hand to ``step``."""
        ...

    def step(self, state: S, happened: Iteration) -> tuple[int, S]:
        """The next quorum, from 1 to ``happened.present``."""
        ...
