"""What happens to a parameter server, as it enters by ``Coordinator.handle``. Times are seconds."""

from __future__ import annotations

from typing import Any, NamedTuple

from paceline.pieces.sharing import WorkerRound


class Task(NamedTuple):
    """One gradient to compute."""

    number: int
    worker: int
    version: int  # of the parameters it is computed on
    tag: int  # the version it counts for
    taken: Any  # samples, in the pool's own terms
    load: int
    began: float  # seconds
    shared: bool = False  # its samples are the round's: whoever is free runs them


class Start(NamedTuple):
    """Everybody begins. workers: who is there, all where not given."""

    now: float
    workers: frozenset[int] | None = None


class Arrive(NamedTuple):
    """The gradient of task ``number`` is here. Where its worker was given up meanwhile, it is of no use.

    seconds: of the computation, the round trip by default. ran: what the worker really did of a shared round.
    """

    now: float
    worker: int
    number: int
    seconds: float | None = None
    ran: WorkerRound | None = None


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


def told(event: Event) -> str:
    """The event in a few words, without samples."""
    what = type(event).__name__.lower()
    match event:
        case Start():
            return f"at {event.now:.3f} s start"
        case Arrive():
            return f"at {event.now:.3f} s {what} {event.worker}, task {event.number}"
        case Leave():
            return f"at {event.now:.3f} s {what} {event.worker}, {event.why}"
        case _:
            return f"at {event.now:.3f} s {what} {event.worker}"
