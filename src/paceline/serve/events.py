"""The events of a job, their effects, and the job's refusals.

``Job.handle`` takes an event. The log stores it as a list: its name, its time, and its other fields. Effects are the
consequences of an event. A refusal is one sentence, and changes nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from paceline.errors import PacelineError
from paceline.rounds import RoundResult


class Report(NamedTuple):
    """A worker's report on a round. seconds: its own, without waiting; overhead: the part that does not grow
    with the samples. cpu, memory: portions of its machine that are available to it; None if unknown.
    """

    round: int
    samples: int
    seconds: float
    overhead: float = 0.0
    cpu: float | None = None
    memory: float | None = None


class JoinEvent(NamedTuple):
    """A worker takes a place that ``JobWorkers.place`` returned. secret: the digest of its secret."""

    now: float
    name: str
    secret: str
    place: int


class LeaveEvent(NamedTuple):
    """A worker leaves; the others do not wait for it."""

    now: float
    name: str


class DropEvent(NamedTuple):
    """A worker that has been silent for too long is removed; from the next plan on the others run its part."""

    now: float
    name: str


class RoundDeal(NamedTuple):
    """The deal of a round whose samples cost differently.

    lengths: the samples' lengths. order: indices into them, one worker's after another's. sizes: samples of each
    micro-batch, by the worker's place.
    """

    lengths: list[float]
    order: list[int]
    sizes: list[list[int]]


class Settle(NamedTuple):
    """The next round is handed out, with a plan for the workers present. loads: samples by place. dealt: which
    samples these are, if they cost differently."""

    now: float
    round: int
    loads: list[int]
    dealt: RoundDeal | None = None


class ReportEvent(NamedTuple):
    """A worker has finished its part. Repeating the same report changes nothing."""

    now: float
    name: str
    report: Report


class Resume(NamedTuple):
    """The service has restarted: the time while it was down counts as no worker's silence."""

    now: float


Event = JoinEvent | LeaveEvent | DropEvent | Settle | ReportEvent | Resume
# Stored logs have these names, so that they never change.
NAMES: dict[str, type[Any]] = {
    "join": JoinEvent,
    "leave": LeaveEvent,
    "drop": DropEvent,
    "settle": Settle,
    "reported": ReportEvent,
    "resume": Resume,
}
_NAME_OF = {kind: name for name, kind in NAMES.items()}


def logged(event: Event) -> list[Any]:
    """The event as it is stored in the log."""
    return [_NAME_OF[type(event)], *event]


def read(call: Sequence[Any]) -> Event:
    """The event of an entry of the log. Raises KeyError, TypeError or ValueError if it is not an event."""
    name, *fields = call
    event: Event = NAMES[name](*fields)
    if isinstance(event, Settle) and event.dealt is not None:
        return event._replace(dealt=RoundDeal(*event.dealt))
    return event._replace(report=Report(*event.report)) if isinstance(event, ReportEvent) else event


class Departure(NamedTuple):
    """A worker is no longer present. why: a clause after its name, such as "has left" or "was dropped"."""

    now: float
    name: str
    why: str


class Ready(NamedTuple):
    """From now on, the next worker that asks gets the next round."""

    now: float
    round: int


class Unlearned(NamedTuple):
    """The policy failed at a completed round and learned nothing from it: its plans do not change."""

    error: Exception


# A JoinEvent or a Settle among the effects confirms that event.
Effect = JoinEvent | Departure | Settle | Ready | RoundResult | Unlearned


class NotFound(PacelineError):
    """There is no such job or worker."""


class Forbidden(PacelineError):
    """The secret is not this worker's."""


class Conflict(PacelineError):
    """The request does not fit the job's state."""


class Gone(PacelineError):
    """The worker has left or was dropped."""


class NotStored(PacelineError):
    """The state cannot be stored; nothing was changed."""


class SetAside(Conflict):
    """The job cannot continue: its stored state is kept unchanged, and no other job is affected."""


STATUS = {NotFound: 404, Forbidden: 403, Conflict: 409, Gone: 410, NotStored: 507}


def status_of(error: PacelineError) -> int:
    """The HTTP status of the answer for this error."""
    return next((code for kind, code in STATUS.items() if isinstance(error, kind)), 422)
