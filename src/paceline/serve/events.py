"""What happens to a job, as it enters by ``Job.handle`` and as it stands in the log.

In the log an event is a list: its name, when it happened, and the rest of what it says. Services of earlier versions
wrote the same lists.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from paceline.serve.effects import Report


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
    which of them where they cost differently."""

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
NAMES: dict[str, type[Any]] = {
    "join": Join,
    "leave": Leave,
    "drop": Drop,
    "settle": Settle,
    "report": Reported,
    "resume": Resume,
}
WORDS = {kind: name for name, kind in NAMES.items()}


def logged(event: Event) -> list[Any]:
    """The event as it stands in the log."""
    said = event[:-1] if isinstance(event, Settle) and event.dealt is None else event
    return [WORDS[type(event)], *(list(part) if isinstance(part, Report | Dealt) else part for part in said)]


def read(call: Sequence[Any]) -> Event:
    """The event that stands so in the log. Raises KeyError, TypeError or ValueError where none does."""
    name, *said = call
    event: Event = NAMES[name](*said)
    if isinstance(event, Settle) and event.dealt is not None:
        return event._replace(dealt=Dealt(*event.dealt))
    return event._replace(report=Report(*event.report)) if isinstance(event, Reported) else event


def told(event: Event) -> str:
    """The event in a few words, without the secret."""
    left_out = ("secret", "dealt")
    said = (part for name, part in zip(event._fields[1:], event[1:], strict=True) if name not in left_out)
    return f"at {event.now:.3f} s {WORDS[type(event)]} {', '.join(str(part) for part in said)}".rstrip()
