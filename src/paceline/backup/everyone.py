"""``everyone`` and ``static``, which wait for all gradients or for a fixed number of them."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.backup.protocol import Backup, Iteration
from paceline.errors import whole

Nothing = tuple[()]  # the state: these policies remember nothing


@dataclass(frozen=True)
class Everyone(Backup[Nothing]):
    """Waits for every worker that is present.

    Args:
        workers: Number of workers, n.
    """

    workers: int

    def init(self) -> tuple[int, Nothing]:
        return self.workers, ()

    def step(self, state: Nothing, happened: Iteration) -> tuple[int, Nothing]:
        return max(1, happened.present), state


@dataclass(frozen=True)
class Static(Backup[Nothing]):
    """Waits for the first k gradients (Chen et al. 2016).

    Args:
        workers: Number of workers, n.
        k: Gradients of an update, from 1 to n.
    """

    workers: int
    k: int = 0

    def __post_init__(self) -> None:
        whole("static: k", self.k, 1, self.workers)

    def init(self) -> tuple[int, Nothing]:
        return self.k, ()

    def step(self, state: Nothing, happened: Iteration) -> tuple[int, Nothing]:
        return max(1, min(self.k, happened.present)), state
