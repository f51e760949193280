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
    """A worker's finished gradient.

    Attributes:
        worker: The worker's number, from 0.
        version: Version of the parameters for which it counts; the newest version minus this is its staleness.
        weight: A factor in addition to its number of samples.
    """

    worker: int
    version: int
    weight: float = 1.0


class Apply(NamedTuple):
    """Update the parameters once with these gradients; their version rises by one.

    Attributes:
        gradients: The gradients.
        scale: "mean" divides the weighted sum over samples by the weighted samples in it; "batch" by the global
            batch, so that each sample moves the parameters as much as under BSP.
    """

    gradients: tuple[Gradient, ...]
    scale: Literal["mean", "batch"] = "mean"


class Drop(NamedTuple):
    """This gradient arrived too late for its version; its samples are free again.

    Attributes:
        gradient: The gradient.
    """

    gradient: Gradient


class Interrupt(NamedTuple):
    """Stop the computation of these workers; their samples are free again.

    Attributes:
        workers: Their numbers, from 0.
    """

    workers: tuple[int, ...]


class Release(NamedTuple):
    """Let these workers compute a gradient at the newest parameters, which are ``version``.

    Attributes:
        workers: Their numbers, from 0.
        version: The newest version.
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
    """Decides when parameters move. Frozen: all that changes is in the state, a NamedTuple of tuples and numbers.

    Attributes:
        workers: Number of workers, n.
        modes: How parameters may reach the workers: of "push-wait", "push-interrupt" and "pull".
        takes_quorum: Whether a backup policy may set the number of gradients to wait for.
    """

    workers: int
    modes: ClassVar[tuple[str, ...]] = ("push-wait",)
    takes_quorum: ClassVar[bool] = False

    def init(self) -> tuple[Effects, S]:
        """Begin a run; all workers start at version 0.

        Returns:
            Effects to carry out, and the state to pass to the next call.
        """
        ...

    def arrive(self, state: S, worker: int, now: float) -> tuple[Effects, S]:
        """Handle a worker's gradient that has arrived.

        Args:
            state: As the call before returned it.
            worker: The worker's number, from 0.
            now: Seconds on the engine's clock.

        Returns:
            Effects to carry out, and the next state.
        """
        ...

    def leave(self, state: S, worker: int, now: float) -> tuple[Effects, S]:
        """Handle a worker that died or left; no update waits for it any longer. Gradients that it has delivered
        count.

        Args:
            state: As the call before returned it.
            worker: A worker's number, from 0.
            now: Seconds on the engine's clock.

        Returns:
            Effects to carry out, and the next state.
        """
        ...

    def join(self, state: S, worker: int, now: float) -> tuple[Effects, S]:
        """Handle a worker that joins, again or for the first time, and gets the newest parameters.

        Args:
            state: As the call before returned it.
            worker: A worker's number, from 0.
            now: Seconds on the engine's clock.

        Returns:
            Effects to carry out, and the next state.
        """
        ...

    def expect(self, state: S, quorum: int, now: float) -> tuple[Effects, S]:
        """Wait for ``quorum`` gradients in each update from now on.

        Args:
            state: As the call before returned it.
            quorum: Gradients of an update, 1 or more.
            now: Seconds on the engine's clock.

        Returns:
            Effects to carry out, and the next state.

        Raises:
            NotImplementedError: If the gate does not have ``takes_quorum``.
        """
        raise NotImplementedError


def weight_of(staleness: int, stale: str) -> float:
    """The weight of a stale gradient: 1, or with "inverse" 1 / (staleness + 1) (DynSGD, whose d is staleness + 1)."""
    return 1.0 if stale == "full" else 1.0 / (staleness + 1)


def replaced(values: tuple[Any, ...], index: int, value: Any) -> tuple[Any, ...]:
    """The tuple with one entry changed, extended with GONE if it is too short."""
    longer = values + (GONE,) * (index - len(values))
    return (*longer[:index], value, *longer[index + 1 :])
