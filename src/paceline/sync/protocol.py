"""The protocol that every gate follows.

A gate decides when parameters move and which workers may continue; it does not compute, wait or read a clock. An
engine calls ``init`` once, then ``arrive`` for each finished gradient, and ``leave`` and ``join`` when workers leave
and join. Each call returns effects as plain data, which the engine carries out in order and tests compare. After each
``Apply`` the engine may ask a backup policy for a new quorum and pass it on with ``expect``.
"""

from __future__ import annotations

from typing import Any, ClassVar, Literal, NamedTuple, Protocol, TypeVar

S = TypeVar("S")
IDLE, GONE = -1, -2  # take the place of the version for which a worker computes


class Gradient(NamedTuple):
    """A worker's finished gradient."""

    worker: int
    version: int  # of the parameters for which it counts; the newest version minus this is its staleness
    weight: float = 1.0  # a factor in addition to its number of samples


class Apply(NamedTuple):
    """Update the parameters once with these gradients; their version rises by one.

    scale: "mean" divides the weighted sum over samples by the weighted samples in it; "batch" by the global
        batch, so that each sample moves the parameters as much as under BSP.
    """

    gradients: tuple[Gradient, ...]
    scale: Literal["mean", "batch"] = "mean"


class Drop(NamedTuple):
    """This gradient arrived too late for its version; its samples are free again."""

    gradient: Gradient


class Interrupt(NamedTuple):
    """Stop the computation of these workers; their samples are free again."""

    workers: tuple[int, ...]


class Release(NamedTuple):
    """Let these workers compute a gradient at the newest parameters, which are ``version``.

    Attributes:
        tag: The version for which their gradients will count (older than ``version`` only in pull mode).
    """

    workers: tuple[int, ...]
    version: int
    tag: int


Effect = Apply | Drop | Interrupt | Release
"""One instruction to the engine."""

Effects = tuple[Effect, ...]
"""Instructions that the engine carries out in this order."""


class Gate(Protocol[S]):
    """Decides when parameters move. Frozen: all that changes is in the state, a NamedTuple of tuples and numbers."""

    workers: int
    modes: ClassVar[tuple[str, ...]] = ("push-wait",)  # of push-wait, push-interrupt and pull
    takes_quorum: ClassVar[bool] = False  # a backup policy may set the number of gradients to wait for

    def init(self) -> tuple[Effects, S]:
        """All workers start at version 0."""
        ...

    def arrive(self, state: S, worker: int, now: float) -> tuple[Effects, S]:
        """The worker's gradient has arrived.

        Args:
            now: Seconds of the engine's clock.
        """
        ...

    def leave(self, state: S, worker: int, now: float) -> tuple[Effects, S]:
        """The worker died or left; no update waits for it any longer. Gradients that it has delivered count.

        Args:
            state: As the call before returned it.
            worker: A worker's number, from 0.
            now: Seconds on the engine's clock.
        """
        ...

    def join(self, state: S, worker: int, now: float) -> tuple[Effects, S]:
        """The worker joins, again or for the first time, and gets the newest parameters.

        Args:
            state: As the call before returned it.
            worker: A worker's number, from 0.
            now: Seconds on the engine's clock.
        """
        ...

    def expect(self, state: S, quorum: int, now: float) -> tuple[Effects, S]:
        """From now on an update waits for ``quorum`` gradients, 1 or more; only for gates with ``takes_quorum``.

        Args:
            state: As the call before returned it.
            quorum: Gradients of an update, 1 or more.
            now: Seconds on the engine's clock.
        """
        raise NotImplementedError


def weight_of(staleness: int, stale: str) -> float:
    """The weight of a stale gradient: 1, or with "inverse" 1 / (staleness + 1) (DynSGD, whose d is staleness + 1)."""
    return 1.0 if stale == "full" else 1.0 / (staleness + 1)


def replaced(values: tuple[Any, ...], index: int, value: Any) -> tuple[Any, ...]:
    """The tuple with one entry changed, extended with GONE if it is too short."""
    longer = values + (GONE,) * (index + 1 - len(values))
    return (*longer[:index], value, *longer[index + 1 :])
