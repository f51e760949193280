"""The counter behind claims in memory that all ranks share, as those of one machine do: an addition takes some
microseconds, and no other process or thread has to run for it."""

from __future__ import annotations

import struct
import time
from contextlib import suppress

from paceline.errors import WorkerError
from paceline.torch import memory, peers
from paceline.torch.claiming.counter import Count, Counter, LocalCounter, StoreCounter, count_of, packed
from paceline.torch.memory import Memory

with suppress(ImportError):  # on Windows, where no memory is shared so
    import fcntl

SLOT = struct.Struct("<qq")  # of a round: its number, and what is counted in it
ROUNDS = 4  # that are kept; all have left the others: their gradients have been reduced
LENGTH = ROUNDS * SLOT.size
SOON_SECONDS, LOOK_SECONDS = 2e-5, 1e-3  # between two attempts at the lock: at first, and at most


class NearbyCounter(Counter):
    """Each addition holds a lock, which the system takes back from a process that ends.

    seconds: how long an addition waits at most for a process that has stopped in the middle of one. memory: of
    ``LENGTH``, with its file.
    """

    keeper = "the memory of this machine"
    quick = True

    def __init__(self, memory: Memory, seconds: float) -> None:
        self._memory, self._seconds = memory, seconds

    def add(self, step: int, samples: int = 0, told: int = 0, speed: int = 0) -> Count:
        at, content = step % ROUNDS * SLOT.size, self._memory.content
        self._lock()
        try:
            held, number = SLOT.unpack_from(content, at)
            after = packed(samples, told, speed) + (number if held == step else 0)
            SLOT.pack_into(content, at, step, after)
        finally:
            fcntl.lockf(self._file, fcntl.LOCK_UN, 1)
        return count_of(after, samples)

    def close(self) -> None:
        self._memory.close_file()

    @property
    def _file(self) -> int:
        assert self._memory.file is not None
        return self._memory.file

    def _lock(self) -> None:
        began, pause = 0.0, SOON_SECONDS
        while True:
            try:
                return fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1)
            except (BlockingIOError, PermissionError):  # another process has it
                began = began or time.monotonic()
                if time.monotonic() - began > self._seconds:
                    raise WorkerError(
                        f"rank {peers.rank()} could not claim work for {self._seconds:.0f} s, as long as the process "
                        "group waits: another rank has stopped in the middle of a claim; end the run and go on from "
                        "the last checkpoint"
                    ) from None
                time.sleep(pause)
                pause = min(2 * pause, LOOK_SECONDS)


def shared() -> NearbyCounter | None:
    """The counter of ranks that are all on one machine; None, for all of them, where they are not. Collective."""
    found = memory.common(LENGTH)
    return None if found is None else NearbyCounter(found, peers.timeout())


def counter() -> Counter:
    """The counter that suits the process group. Collective."""
    if peers.ranks() == 1:
        return LocalCounter()
    return shared() or StoreCounter()
