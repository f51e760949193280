"""What goes into a job and what comes out of it."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from paceline.rounds import Array


class Report(NamedTuple):
    """What a worker did in a round. seconds: its own, without waiting; overhead: the part that does not grow
    with the samples. cpu, memory: portions of its machine that it can have; None where not read.
    """

    round: int
    samples: int
    seconds: float
    overhead: float = 0.0
    cpu: float | None = None
    memory: float | None = None


class Joined(NamedTuple):
    """A worker took a place."""

    now: float
    name: str
    place: int


class Left(NamedTuple):
    """A worker is no longer there: it "left", was "silent" for so many seconds, or was "replaced"."""

    now: float
    name: str
    why: str
    silent: float = 0.0


class Settled(NamedTuple):
    """A round was planned for whom was there; loads in samples by place."""

    now: float
    round: int
    loads: tuple[int, ...]


class Ready(NamedTuple):
    """From now on, whoever asks is given the next round."""

    now: float
    round: int


class Closed(NamedTuple):
    """A round is over. seconds: since the one before; the arrays by place, NaN where nobody reported."""

    now: float
    round: int
    seconds: float
    loads: Array
    compute: Array
    overhead: Array
    shares: Array
    members: NDArray[np.bool_]  # that were given a part by the plan


class Unlearned(NamedTuple):
    """The policy failed at a round that is over and learned nothing from it: its plans are those of before."""

    now: float
    round: int
    error: Exception


Effect = Joined | Left | Settled | Ready | Closed | Unlearned
