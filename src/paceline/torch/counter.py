"""The counter behind claims: one number that all ranks add to, so that each sample is handed out once.

It holds two numbers in one: how many samples of the pool have been claimed, and by how much the ranks run faster
or slower in this round than was expected of them all. So one round trip tells a rank what is left and what its
part of it should be.
"""

from __future__ import annotations

from typing import Protocol

import torch.distributed as dist

from paceline.errors import WorkerError
from paceline.torch import peers

HALF = 28  # bits of the counter for the samples; the other 35 are for the speeds
SPEED_UNITS = 1 << 20  # of the expected speed of all


class Counter(Protocol):
    """Adds to a number that all ranks share."""

    def add(self, step: int, samples: int, speed: int) -> tuple[int, int]:
        """(samples claimed before, speeds told with these) in this round; the numbers of rounds never fall."""
        ...

    def close(self) -> None: ...


class LocalCounter:
    """One process: nobody to share with."""

    def __init__(self) -> None:
        self._step, self._samples, self._speed = -1, 0, 0

    def add(self, step: int, samples: int, speed: int) -> tuple[int, int]:
        if step != self._step:
            self._step, self._samples, self._speed = step, 0, 0
        before = self._samples
        self._samples, self._speed = self._samples + samples, self._speed + speed
        return before, self._speed

    def close(self) -> None:
        pass


class StoreCounter:
    """On a TCPStore of its own, which rank 0 hosts; a key a round, deleted two rounds later."""

    def __init__(self, timeout: float = 60.0) -> None:
        self._rank = peers.rank()
        self._store: dist.TCPStore | None = peers.own_store(timeout)
        self._newest = -1

    def add(self, step: int, samples: int, speed: int) -> tuple[int, int]:
        assert self._store is not None
        if step != self._newest:
            self._newest = step
            if self._rank == 0:  # everybody has left that round: its gradients have been reduced
                self._store.delete_key(str(step - 2))
        try:
            after = self._store.add(str(step), samples + (speed << HALF))
        except dist.DistError as error:
            raise WorkerError(
                f"rank {self._rank} got no answer from rank 0, where work is claimed; rank 0 has "
                "left the run or hangs, look there for the reason"
            ) from error
        return (after & ((1 << HALF) - 1)) - samples, after >> HALF

    def close(self) -> None:
        self._store = None


def counter() -> Counter:
    """The counter that suits the process group. Collective."""
    return StoreCounter() if peers.ranks() > 1 else LocalCounter()
