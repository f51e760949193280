"""What a gate tells its engine to do: plain data, which tests compare and engines carry out in order."""

from __future__ import annotations

from typing import Literal, NamedTuple


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
