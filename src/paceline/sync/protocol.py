"""The protocol every gate follows.

A gate decides when parameters move and who may go on; it neither computes nor waits nor reads a clock. An
engine calls ``init`` once, then ``arrive`` for each finished gradient, ``leave`` and ``join`` as workers go and
come, and carries out the effects in their order. After each ``Apply`` it may ask a backup policy for a new
quorum and hand it over with ``expect``.

What a gate tells its engine to do is plain data, which tests compare and engines carry out in order.
"""

from __future__ import annotations

from typing import Any, ClassVar, Literal, NamedTuple, Protocol, TypeVar

S = TypeVar("S")
IDLE, GONE = -1, -2  # in place of the version a worker computes for


class Gradient(NamedTuple):
    """A worker's finished gradient."""

    worker: int
    version: int  # of the parameters it was asked for; the newest version minus this is its staleness
    weight: float = 1.0  # on top of its samples


class Apply(NamedTuple):
    """Update the parameters once with these gradients; their version rises by one.

    scale: "mean" divides the weighted sum over samples by the weighted samples in it; "batch" by the global
        batch, so that each sample moves the parameters as much as under BSP.
    """

    gradients: tuple[Gradient, ...]
    scale: Literal["mean", "batch"] = "mean"


class Drop(NamedTuple):
    """This gradient came too late for its version; its samples are free again."""

    gradient: Gradient


class Interrupt(NamedTuple):
    """Stop what these workers are computing; their samples are free again."""

    workers: tuple[int, ...]


class Release(NamedTuple):
    """Let these workers compute a gradient at the newest parameters, which are ``version``.

    tag: the version that their gradients will count for (older than ``version`` only in pull mode).
    """

    workers: tuple[int, ...]
    version: int
    tag: int


Effect = Apply | Drop | Interrupt | Release
"""One thing that the engine is to do."""

Effects = tuple[Effect, ...]
"""What the engine is to do, in this order."""


class Gate(Protocol[S]):
    """Frozen: what changes lives in the state, a NamedTuple of tuples and numbers."""

    workers: int
    modes: ClassVar[tuple[str, ...]] = ("push-wait",)  # of push-wait, push-interrupt and pull
    takes_quorum: ClassVar[bool] = False  # a backup policy may say how many gradients to wait for

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
        """From now on an update waits for this many gradients, 1 or more; of gates with ``takes_quorum`` alone."""
        raise NotImplementedError


def weight_of(staleness: int, stale: str) -> float:
    """1, or with "inverse" 1 / (staleness + 1) (DynSGD, in which d is the staleness plus 1)."""
    return 1.0 if stale == "full" else 1.0 / (staleness + 1)


def replaced(values: tuple[Any, ...], index: int, value: Any) -> tuple[Any, ...]:
    """The tuple with one entry changed, and lengthened by GONE where needed."""
    longer = values + (GONE,) * (index + 1 - len(values))
    return (*longer[:index], value, *longer[index + 1 :])
