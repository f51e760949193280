"""The protocol every gate follows.

A gate decides when parameters move and who may go on; it neither computes nor waits nor reads a clock. An
engine calls ``init`` once, then ``arrive`` for each finished gradient, ``leave`` and ``join`` as workers go and
come, and carries out the effects in their order. After each ``Apply`` it may ask a backup policy for a new
quorum and hand it over with ``expect``.
"""

from __future__ import annotations

from typing import Any, ClassVar, Protocol, TypeVar

from paceline.sync.effects import Effects

S = TypeVar("S")
IDLE, GONE = -1, -2  # in place of the version a worker computes for


class Gate(Protocol[S]):
    """Frozen: what changes lives in the state, a NamedTuple of tuples and numbers."""

    workers: int
    modes: ClassVar[tuple[str, ...]]  # push-wait, push-interrupt, pull
    takes_quorum: ClassVar[bool]  # a backup policy may say how many gradients to wait for

    def init(self) -> tuple[Effects, S]:
        """Everybody starts at version 0."""
        ...

    def arrive(self, state: S, worker: int, now: float) -> tuple[Effects, S]:
        """The worker's gradient is here. now: seconds, of whatever clock the engine keeps."""
        ...

    def leave(self, state: S, worker: int, now: float) -> tuple[Effects, S]:
        """The worker died or left; it is waited for no longer. What it has delivered counts."""
        ...

    def join(self, state: S, worker: int, now: float) -> tuple[Effects, S]:
        """The worker is there, again or for the first time, and gets the newest parameters."""
        ...

    def expect(self, state: S, quorum: int, now: float) -> tuple[Effects, S]:
        """From now on an update waits for this many gradients."""
        ...


def replaced(values: tuple[Any, ...], index: int, value: Any) -> tuple[Any, ...]:
    """The tuple with one entry changed, and lengthened by GONE where needed."""
    longer = values + (GONE,) * (index + 1 - len(values))
    return (*longer[:index], value, *longer[index + 1 :])
