"""What happens to a job, what comes of it, and what it refuses.

An event enters by ``Job.handle``, and stands in the log as a list: its name, when it happened, and the rest of what
it says. Effects are what follows from it. A refusal is one sentence, and changes nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, get_args

from paceline.errors import PacelineError
from paceline.rounds import RoundResult


class Report(NamedTuple):
    """What a worker did in a round. seconds: its own, without waiting; overhead: the part that does not grow
    with the samples. cpu, memory: portions of its machine that it can have; None if not read.
    """

    round: int
    samples: int
    seconds: float
    overhead: float = 0.0
    cpu: float | None = None
    memory: float | None = None


class Join(NamedTuple):
    """A worker takes a place that ``members.place`` gave. secret: its digest."""

    now: float
    name: str
    secret: str
    place: int


class Leave(NamedTuple):
    """A worker goes; nobody waits for it."""

    now: float
    name: str


class Drop(NamedTuple):
    """A worker that has been silent for too long goes; its part is the others' from the next plan on."""

    now: float
    name: str


class Dealt(NamedTuple):
    """A round whose samples cost differently.

    lengths: of its samples. order: places among them, one worker's after the other's. sizes: samples of each
    micro-batch, by worker's place.
    """

    lengths: list[float]
    order: list[int]
    sizes: list[list[int]]


class Settle(NamedTuple):
    """The next round is handed out, by a plan that ``Job.plan`` made for those who are present: samples by place, and
    which of them if they cost differently."""

    now: float
    round: int
    loads: list[int]
    dealt: Dealt | None = None


class Reported(NamedTuple):
    """A worker has done its part. The same report again changes nothing."""

    now: float
    name: str
    report: Report


class Resume(NamedTuple):
    """The service is back: whatever time it was away counts against nobody."""

    now: float


Event = Join | Leave | Drop | Settle | Reported | Resume
NAMES: dict[str, type[Any]] = {kind.__name__.lower(): kind for kind in get_args(Event)}


def logged(event: Event) -> list[Any]:
    """The event as it stands in the log."""
    return [type(event).__name__.lower(), *event]


def read(call: Sequence[Any]) -> Event:
    """The event that stands so in the log. Raises KeyError, TypeError or ValueError where none does."""
    name, *said = call
    event: Event = NAMES[name](*said)
    if isinstance(event, Settle) and event.dealt is not None:
        return event._replace(dealt=Dealt(*event.dealt))
    return event._replace(report=Report(*event.report)) if isinstance(event, Reported) else event


class Left(NamedTuple):
    """A worker is no longer there. why: what it has done, or what was done with it, in the words of a sentence."""

    now: float
    name: str
    why: str


class Ready(NamedTuple):
    """From now on, whoever asks is given the next round."""

    now: float
    round: int


class Unlearned(NamedTuple):
    """The policy failed at a round that is over and learned nothing from it: its plans are those of before."""

    error: Exception


Effect = Join | Left | Settle | Ready | RoundResult | Unlearned  # what was done is told as it was asked for


class NotFound(PacelineError):
    """There is no such job or worker."""


class Forbidden(PacelineError):
    """It is not the worker's secret."""


class Conflict(PacelineError):
    """It does not fit the job's state."""


class Gone(PacelineError):
    """The worker has left or was dropped."""


class NotStored(PacelineError):
    """The state cannot be stored; nothing was changed."""


class SetAside(Conflict):
    """The job cannot go on: what was stored of it is kept as it is, and no other job is concerned."""


STATUS = {NotFound: 404, Forbidden: 403, Conflict: 409, Gone: 410, NotStored: 507}


def status_of(error: PacelineError) -> int:
    """The HTTP status of an answer that refuses."""
    return next((code for kind, code in STATUS.items() if isinstance(error, kind)), 422)
