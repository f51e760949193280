"""The counter behind claims: one number that all ranks add to, so that each sample is handed out once.

It packs three numbers into one: how many samples of the pool have been claimed, how many ranks have reported their
speed in this round, and how much faster or slower than expected all of them together run. One round trip therefore
shows a rank what is left and how much of it the rank should claim.
"""

from __future__ import annotations

import struct
import time
from contextlib import suppress
from typing import NamedTuple, Protocol

import torch.distributed as dist

from paceline.errors import WorkerError
from paceline.torch import peers, shared_memory
from paceline.torch.options import RANKS, SAMPLES
from paceline.torch.shared_memory import Memory

SPEED_UNITS = 1 << 12  # units that the expected speed of all ranks together has; 24 bits hold the sum
MOST_SPEED = 1 << 11  # times that speed; the sum of what all ranks report must stay below
CONNECT_SECONDS = 60.0  # seconds to reach the store


class Count(NamedTuple):
    """A round's counts: samples claimed before, ranks that have reported their speed, and the sum of the speeds."""

    samples: int
    reported: int
    speed: int


def packed(samples: int, reported: int, speed: int) -> int:
    """The three numbers packed into one."""
    return samples + (reported << SAMPLES) + (speed << SAMPLES + RANKS)


def count_of(after: int, samples: int) -> Count:
    """The counts in the packed number ``after``, which this rank has just added ``samples`` to."""
    claimed, others = after & ((1 << SAMPLES) - 1), after >> SAMPLES
    return Count(claimed - samples, others & ((1 << RANKS) - 1), others >> RANKS)


class Counter(Protocol):
    """Adds to numbers that all ranks share. keeper: the process that holds them, for the message if it does not
    answer. quick: an addition takes a few microseconds, so that ranks do not have to claim ahead."""

    keeper: str
    quick: bool

    def add(self, step: int, samples: int = 0, reported: int = 0, speed: int = 0) -> Count:
        """Add to the counts of round ``step``, and return them. Round numbers never decrease between calls."""
        ...

    def close(self) -> None: ...


class LocalCounter:
    """The counter of a single process."""

    keeper = "this process"
    quick = True

    def __init__(self) -> None:
        self._step, self._count = -1, Count(0, 0, 0)

    def add(self, step: int, samples: int = 0, reported: int = 0, speed: int = 0) -> Count:
        before = self._count if step == self._step else Count(0, 0, 0)
        self._step = step
        self._count = Count(before.samples + samples, before.reported + reported, before.speed + speed)
        return self._count._replace(samples=before.samples)

    def close(self) -> None:
        pass


class StoreCounter:
    """A counter on its own TCPStore, which rank 0 hosts: one key for each round, deleted two rounds later.

    ``add`` hangs as long as rank 0 is stopped.
    """

    keeper = "rank 0"
    quick = False

    def __init__(self) -> None:
        self._rank = peers.rank()
        self._store: dist.TCPStore | None = peers.own_store(CONNECT_SECONDS)
        self._newest = -1

    def add(self, step: int, samples: int = 0, reported: int = 0, speed: int = 0) -> Count:
        assert self._store is not None
        if step != self._newest:
            self._newest = step
            if self._rank == 0:  # no rank is still in that round: its gradients have been reduced
                self._store.delete_key(str(step - 2))
        try:
            after = self._store.add(str(step), packed(samples, reported, speed))
        except dist.DistError as error:
            raise WorkerError(
                f"rank {self._rank} got no answer from rank 0, where work is claimed; rank 0 has left the run, see "
                "its output for the reason"
            ) from error
        return count_of(after, samples)

    def close(self) -> None:
        self._store = None


with suppress(ImportError):  # on Windows, where memory cannot be shared in this way
    import fcntl

SLOT = struct.Struct("<qq")  # one round: its number, and its packed counts
ROUNDS = 4  # rounds kept; no rank is still in an older one, since its gradients have been reduced
LENGTH = ROUNDS * SLOT.size
SOON_SECONDS, LOOK_SECONDS = 2e-5, 1e-3  # pause between two attempts at the lock: the first, and the longest


class NearbyCounter(Counter):
    """A counter in shared memory. Each addition holds a lock, which the system releases if its process ends.

    memory: ``LENGTH`` bytes, with a file. seconds: how long an addition waits at most for the lock, which a process
    that was stopped in the middle of an addition still holds.
    """

    keeper = "the memory of this machine"
    quick = True

    def __init__(self, memory: Memory, seconds: float) -> None:
        assert memory.file is not None
        self._memory, self._file, self._seconds = memory, memory.file, seconds

    def add(self, step: int, samples: int = 0, reported: int = 0, speed: int = 0) -> Count:
        at, content = step % ROUNDS * SLOT.size, self._memory.content
        self._lock()
        try:
            held, number = SLOT.unpack_from(content, at)
            after = packed(samples, reported, speed) + (number if held == step else 0)
            SLOT.pack_into(content, at, step, after)
        finally:
            fcntl.lockf(self._file, fcntl.LOCK_UN, 1)
        return count_of(after, samples)

    def close(self) -> None:
        self._memory.close_file()

    def _lock(self) -> None:
        began, pause = 0.0, SOON_SECONDS
        while True:
            try:
                return fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1)
            except (BlockingIOError, PermissionError):  # another process holds the lock
                began = began or time.monotonic()
                if time.monotonic() - began > self._seconds:
                    raise WorkerError(
                        f"rank {peers.rank()} could not claim work for {self._seconds:.0f} s, as long as the process "
                        "group waits: another rank has stopped within a claim; end the run and continue from "
                        "the last checkpoint"
                    ) from None
                time.sleep(pause)
                pause = min(2 * pause, LOOK_SECONDS)


def counter() -> Counter:
    """The quickest counter that works for the ranks of the process group. Collective."""
    if peers.ranks() == 1:
        return LocalCounter()
    found = shared_memory.common(LENGTH)
    return StoreCounter() if found is None else NearbyCounter(found, peers.timeout())
