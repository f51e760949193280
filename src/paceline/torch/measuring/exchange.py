"""How the ranks' measurements travel: a few numbers a round, beside the gradients.

``send`` is called when a rank's gradients are ready, just before or after the sum of its last bucket begins;
``receive`` after the step. By then every rank has sent, or is about to (its gradients could not have arrived
otherwise), so nobody waits longer than a moment. Ranks of one machine tell each other in memory that they share: that
takes no system call, and no other thread has to run for it. Those of several machines take part in a collective,
which costs each of them some tenths of a millisecond of its processors.

What travels is a row of numbers with names: a structured dtype whose fields are all float64, so that it is one array
of them on its way. Each exchange is made for one such dtype.

On a device the hosts run ahead of the reductions, so that a rank may well be waited for in ``receive``: for as long
as the process group waits in a collective.
"""

from __future__ import annotations

import os
import select
import struct
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Protocol
from zlib import crc32

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from paceline.errors import WorkerError
from paceline.torch import memory, peers

SLOTS = 4  # rounds of which a rank may have told and not yet asked
LOOK_SECONDS = 0.05  # at most, between two looks for a rank that is waited for
SOON_SECONDS = 1e-4  # the same at first
SOON = 1 / 8  # and later, as a part of its wait
LATE_SECONDS = 1e-3  # before that, a rank is about to tell
STEP = struct.Struct("<d")  # before each row: the round that it is of
CHECK = struct.Struct("<I")  # behind it: a checksum, so that who reads while it is written sees that
WHOLE = crc32(CHECK.pack(crc32(b"")))  # the checksum of anything that ends with its own


Rows = NDArray[np.void]  # of a structured dtype
Row = Rows | bytes  # one of them, shape (), or its bytes
Lost = Callable[[], WorkerError | None]


def nobody() -> WorkerError | None:
    """No rank is known to be lost."""
    return None


class Exchange(Protocol):
    """Gives every rank every rank's row."""

    def send(self, step: int, row: Row) -> None:
        """Send this rank's row for round ``step``; returns at once."""
        ...

    def receive(self, step: int, lost: Lost = nobody) -> Rows:
        """All ranks' rows for round ``step``, shape (n,); call after ``send`` of the same round.

        lost: asked while a rank is waited for; the error that it returns is raised.
        """
        ...

    def close(self) -> None:
        """No more rounds; nobody is waited for."""
        ...


class Alone:
    """One process: nobody to tell."""

    def __init__(self, dtype: np.dtype[np.void]) -> None:
        self._dtype = dtype
        self._rows: dict[int, Rows] = {}

    def send(self, step: int, row: Row) -> None:
        self._rows[step % SLOTS] = np.frombuffer(bytearray(_bytes(row)), self._dtype)

    def receive(self, step: int, lost: Lost = nobody) -> Rows:
        return self._rows[step % SLOTS]

    def close(self) -> None:
        pass


class MemoryExchange:
    """In memory that the ranks of one machine share. Each writes into its own, which the others only read; a message
    stays there until its slot is written again.

    dtype: of a row. own, others: of each rank but this one, see ``of_all``. timeout: seconds to wait for a late rank.
    """

    def __init__(
        self,
        dtype: np.dtype[np.void],
        own: memory.Memory,
        others: dict[int, tuple[memory.Memory, int]],
        timeout: float,
    ) -> None:
        self._rank, self._timeout, self._dtype = peers.rank(), timeout, dtype
        self._each = STEP.size + dtype.itemsize + CHECK.size
        self._mine, self._others = own.content, {rank: one.content for rank, (one, _) in others.items()}
        self._processes = {rank: process for rank, (_, process) in others.items()}
        self._rows = [b""] * SLOTS
        files = [file for file in self._processes.values() if file >= 0]
        self._end = weakref.finalize(self, _leave, own, files, os.getpid())

    @classmethod
    def of_all(cls, dtype: np.dtype[np.void], timeout: float | None = None) -> MemoryExchange | None:
        """None, for all ranks, if they do not share a machine. Collective."""
        length, rank = SLOTS * (STEP.size + dtype.itemsize + CHECK.size) + 1, peers.rank()
        own, place = memory.make(length)
        others: dict[int, tuple[memory.Memory, int]] = {}
        try:
            for other, where in enumerate(peers.gather(place)):
                if other != rank and (found := memory.find(where, length)) is not None:
                    found.close_file()
                    assert where is not None
                    others[other] = found, _process(where.process)
            if not all(peers.gather(len(others) == peers.ranks() - 1)):
                return None
        finally:
            own.close_file()  # all have opened it by now
        return cls(dtype, own, others, peers.timeout() if timeout is None else timeout)

    def send(self, step: int, row: Row) -> None:
        self._rows[step % SLOTS] = own = _bytes(row)
        message = STEP.pack(step) + own
        at = step % SLOTS * self._each
        self._mine[at : at + self._each] = message + self._check(message)

    def receive(self, step: int, lost: Lost = nobody) -> Rows:
        head, rows = STEP.pack(step), []
        for rank in self._others:
            message = self._hear(rank, step)
            if not message.startswith(head):
                message = self._wait(rank, step, lost)
            rows.append(message[STEP.size : -CHECK.size])
        rows.insert(self._rank, self._rows[step % SLOTS])
        return np.frombuffer(bytearray().join(rows), self._dtype)

    def close(self) -> None:
        """Nobody need be waited for: what was sent stays where the others have it."""
        self._end()

    def _hear(self, rank: int, step: int) -> bytes:
        """What stands in the slot of this rank's round, perhaps of another round; nothing while it is written."""
        at = step % SLOTS * self._each
        read = self._others[rank][at : at + self._each]
        return read if crc32(read) == WHOLE else b""

    def _wait(self, rank: int, step: int, lost: Lost) -> bytes:
        """The rank's message of round ``step``, which is not there yet."""
        began, head, ended = time.monotonic(), STEP.pack(step), False
        while not (message := self._hear(rank, step)).startswith(head):
            if ended:
                raise _no_answer(f"rank {rank}") from dist.DistNetworkError("its exchange was closed")
            waited = _wait_on(began, self._timeout, lost, f"rank {rank}")
            if waited > LATE_SECONDS:
                ended = self._ended(rank)
        return message

    def _ended(self, rank: int) -> bool:
        """Whether a rank has closed its exchange, or its process has ended: it never tells anything any more."""
        if self._others[rank][-1]:
            return True
        if (file := self._processes[rank]) < 0:
            return False
        ready = select.poll()
        ready.register(file, select.POLLIN)
        return bool(ready.poll(0))

    def _check(self, message: bytes) -> bytes:
        return CHECK.pack(crc32(message))


def _process(number: int) -> int:
    """A file that tells of the end of this process; -1 if there is none."""
    with suppress(AttributeError, OSError):
        return os.pidfd_open(number)
    return -1


def _leave(own: memory.Memory, files: list[int], process: int) -> None:
    """The exchange of this process is closed; a forked child closes nothing but its files."""
    if os.getpid() == process:
        own.content[-1] = 1
    for file in files:
        os.close(file)


def _wait_on(began: float, timeout: float, lost: Lost, who: str) -> float:
    """Wait a little longer for what has been waited for since ``began``; the seconds so far.

    Raises WorkerError if it need not be waited for any longer."""
    waited = time.monotonic() - began
    time.sleep(min(max(SOON * waited, SOON_SECONDS), LOOK_SECONDS))
    if waited > LATE_SECONDS:
        if (error := lost()) is not None:
            raise error
        if waited > timeout:
            raise WorkerError(
                f"{who} has not told of its round {waited:.0f} s after rank {peers.rank()} did, as long as the "
                "process group waits; expected every rank to take the same rounds: look at that rank for what holds "
                "it up, and check that all ranks iterate the same loader"
            )
    return waited


def _no_answer(who: str) -> WorkerError:
    return WorkerError(
        f"rank {peers.rank()} got no answer after its round: {who} has left the run, look there for the reason"
    )


class GroupExchange:
    """Through an asynchronous all-gather on a gloo group of its own, so that its order never mixes with DDP's.
    Constructing it is collective."""

    def __init__(self, dtype: np.dtype[np.void], timeout: float | None = None) -> None:
        self._dtype, self._timeout = dtype, peers.timeout() if timeout is None else timeout
        self._group = dist.new_group(backend="gloo", timeout=timedelta(seconds=peers.timeout()))
        self._pending: dict[int, tuple[dist.Work, list[torch.Tensor]]] = {}

    def send(self, step: int, row: Row) -> None:
        mine = torch.frombuffer(bytearray(_bytes(row)), dtype=torch.float64)
        out = [torch.empty_like(mine) for _ in range(peers.ranks())]
        self._pending[step] = (dist.all_gather(out, mine, group=self._group, async_op=True), out)
        self._pending.pop(step - SLOTS, None)  # of a round that was left

    def receive(self, step: int, lost: Lost = nobody) -> Rows:
        (work, out), began = self._pending[step], time.monotonic()
        while not work.is_completed():
            _wait_on(began, self._timeout, lost, "another rank")
        del self._pending[step]
        try:
            work.wait()
        except RuntimeError as error:
            raise _no_answer("another rank") from error
        return torch.stack(out).numpy().view(self._dtype)[:, 0]

    def close(self) -> None:
        self._pending.clear()


def _bytes(row: Row) -> bytes:
    return row if isinstance(row, bytes) else row.tobytes()


def connect(dtype: np.dtype[np.void]) -> Exchange:
    """The exchange of such rows that suits the default process group. Collective."""
    if peers.ranks() == 1:
        return Alone(dtype)
    return MemoryExchange.of_all(dtype) or GroupExchange(dtype)
