"""Exchanges the ranks' measurements: a few numbers a round, beside the gradients.

``send`` is called when a rank's gradients are ready, just before or after the sum of its last bucket begins;
``receive`` after the step. By then every rank has sent, or is about to (its gradients could not have arrived
otherwise), so no rank waits longer than a moment. Ranks of one machine exchange rows through shared memory: that
takes no system call, and no other thread has to run for it. Ranks of several machines take part in a collective,
which costs each of them some tenths of a millisecond of its processors.

A row is a structured dtype whose fields are all float64, so that it is sent as one array of float64. Each exchange is
made for one dtype.

On a device the hosts run ahead of the reductions, so ``receive`` may wait for another rank: at most for the timeout
of the process group's collectives.
"""

from __future__ import annotations

import os
import select
import struct
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from typing import Protocol
from zlib import crc32

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from paceline.errors import WorkerError
from paceline.torch import groups, peers, shared_memory

SLOTS = 4  # rounds that a rank may have sent and not yet received
LOOK_SECONDS = 0.05  # between two polls of a rank that is waited for, at most
SOON_SECONDS = 1e-4  # the same, at least
SOON = 1 / 8  # the same, as a portion of the wait so far
LATE_SECONDS = 1e-3  # a rank that has not sent after this time may be lost
STEP = struct.Struct("<d")  # before each row: the number of its round
CHECK = struct.Struct("<I")  # behind each row: a checksum, which fails if a row is read while it is written
WHOLE = crc32(CHECK.pack(crc32(b"")))  # the checksum of any message that ends with its own checksum


Rows = NDArray[np.void]  # of a structured dtype
Row = Rows | bytes  # one row, shape (), or its bytes
Lost = Callable[[], WorkerError | None]


def none_lost() -> WorkerError | None:
    """No rank is known to be lost."""
    return None


class Exchange(Protocol):
    """Gives every rank every rank's row."""

    def send(self, step: int, row: Row, lost: Lost = none_lost) -> None:
        """Send this rank's row for round ``step``; returns at once, unless another rank is ``SLOTS`` rounds late.

        lost: see ``receive``."""
        ...

    def receive(self, step: int, lost: Lost = none_lost) -> Rows:
        """All ranks' rows for round ``step``, shape (n,); call after ``send`` of the same round.

        lost: called while a rank is waited for; the error that it returns is raised.
        """
        ...

    def close(self) -> None:
        """No more rounds; does not wait for other ranks."""
        ...


class OwnExchange:
    """The exchange of a single process, which receives its own rows."""

    def __init__(self, dtype: np.dtype[np.void]) -> None:
        self._dtype = dtype
        self._rows: dict[int, Rows] = {}

    def send(self, step: int, row: Row, lost: Lost = none_lost) -> None:
        self._rows[step % SLOTS] = np.frombuffer(bytearray(_bytes(row)), self._dtype)

    def receive(self, step: int, lost: Lost = none_lost) -> Rows:
        return self._rows[step % SLOTS]

    def close(self) -> None:
        pass


class MemoryExchange:
    """An exchange through memory that the ranks of one machine share. Each rank writes into its own memory, which the
    others only read; a message stays there until its slot is written again. Ranks whose rounds wait for each other
    have received a message by then. Others, as those that average their parameters now and then, may be late: behind
    the slots, each rank writes which round it has received.

    dtype: of a row. own: this rank's memory. others: memory and pidfd (see ``_process``) of each other rank.
    timeout: seconds to wait for a late rank.
    """

    def __init__(
        self,
        dtype: np.dtype[np.void],
        own: shared_memory.Memory,
        others: dict[int, tuple[shared_memory.Memory, int]],
        timeout: float,
    ) -> None:
        self._rank, self._timeout, self._dtype = peers.rank(), timeout, dtype
        self._each = STEP.size + dtype.itemsize + CHECK.size
        self._mine, self._others = own.content, {rank: one.content for rank, (one, _) in others.items()}
        self._processes = {rank: process for rank, (_, process) in others.items()}
        self._rows, self._received, self._read_up_to = [b""] * SLOTS, -1, SLOTS * self._each
        files = [file for file in self._processes.values() if file >= 0]
        self._end = weakref.finalize(self, _leave, own, files, os.getpid())

    @classmethod
    def of_all(cls, dtype: np.dtype[np.void], timeout: float | None = None) -> MemoryExchange | None:
        """The exchange of all ranks; None, on all of them, if they do not share a machine. Collective."""
        length, rank = SLOTS * (STEP.size + dtype.itemsize + CHECK.size) + STEP.size + 1, peers.rank()
        own, place = shared_memory.make(length)
        others: dict[int, tuple[shared_memory.Memory, int]] = {}
        near = False
        try:
            for other, where in enumerate(peers.gather(place)):
                if other != rank and (found := shared_memory.find(where, length)) is not None:
                    found.close_file()
                    assert where is not None
                    others[other] = found, _process(where.process)
            near = all(peers.gather(len(others) == peers.ranks() - 1))
        finally:
            own.close_file()  # all ranks have opened it by now
            if not near:
                for _, process in others.values():
                    if process >= 0:
                        os.close(process)
        if not near:
            return None
        return cls(dtype, own, others, peers.timeout() if timeout is None else timeout)

    def send(self, step: int, row: Row, lost: Lost = none_lost) -> None:
        # Whoever has sent the newest round that this rank has received is through with all rounds before it.
        if self._received >= 0 and (step - self._received) % SLOTS == 0:
            for rank in self._others:
                self._wait_until_read(rank, self._received, lost)
        self._rows[step % SLOTS] = own = _bytes(row)
        message = STEP.pack(step) + own
        at = step % SLOTS * self._each
        self._mine[at : at + self._each] = message + self._check(message)

    def receive(self, step: int, lost: Lost = none_lost) -> Rows:
        head, rows = STEP.pack(step), []
        for rank in self._others:
            message = self._read(rank, step)
            if not message.startswith(head):
                message = self._wait(rank, step, lost)
            rows.append(message[STEP.size : -CHECK.size])
        rows.insert(self._rank, self._rows[step % SLOTS])
        self._received = step
        self._mine[self._read_up_to : self._read_up_to + STEP.size] = STEP.pack(step + 1)
        return np.frombuffer(bytearray().join(rows), self._dtype)

    def close(self) -> None:
        """Close without waiting: the others have this rank's memory mapped, and can still read what it sent."""
        self._end()

    def _read(self, rank: int, step: int) -> bytes:
        """The message in the rank's slot for ``step``, perhaps that of another round; empty while it is written."""
        at = step % SLOTS * self._each
        read = self._others[rank][at : at + self._each]
        return read if crc32(read) == WHOLE else b""

    def _wait(self, rank: int, step: int, lost: Lost) -> bytes:
        """Wait for the rank's message of round ``step``, and return it."""
        began, head, ended = time.monotonic(), STEP.pack(step), False
        while not (message := self._read(rank, step)).startswith(head):
            if ended:
                raise _no_answer(f"rank {rank}") from dist.DistNetworkError("its exchange was closed")
            waited = _wait_on(began, self._timeout, lost, f"rank {rank}")
            if waited > LATE_SECONDS:
                ended = self._ended(rank)
        return message

    def _wait_until_read(self, rank: int, step: int, lost: Lost) -> None:
        """Wait until the rank has received round ``step``, or needs it no more: it has sent a later one, or ended."""
        began, other = time.monotonic(), self._others[rank]
        while STEP.unpack_from(other, self._read_up_to)[0] <= step:
            sent = [
                STEP.unpack_from(message)[0] for slot in range(SLOTS) if (message := self._read(rank, slot))
            ]
            waited = _wait_on(began, self._timeout, lost, f"rank {rank}")
            if max(sent, default=0.0) > step or (waited > LATE_SECONDS and self._ended(rank)):
                return

    def _ended(self, rank: int) -> bool:
        """Whether a rank has closed its exchange, or its process has ended, so that it sends nothing more."""
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
    """A pidfd of the process with this number, readable once it has ended; -1 if the system has none."""
    with suppress(AttributeError, OSError):
        return os.pidfd_open(number)
    return -1


def _leave(own: shared_memory.Memory, files: list[int], process: int) -> None:
    """Mark this process's exchange as closed, and close the files; a forked child only closes its files."""
    if os.getpid() == process:
        own.content[-1] = 1
    for file in files:
        os.close(file)


def _wait_on(began: float, timeout: float, lost: Lost, who: str) -> float:
    """Sleep for a moment of a wait that began at ``began``; returns the seconds waited so far.

    Raises WorkerError if ``lost`` gives one, or after ``timeout`` seconds, with ``who`` as its subject."""
    waited = time.monotonic() - began
    time.sleep(min(max(SOON * waited, SOON_SECONDS), LOOK_SECONDS))
    if waited > LATE_SECONDS:
        if (error := lost()) is not None:
            raise error
        if waited > timeout:
            raise WorkerError(
                f"{who} has not reported its round {waited:.0f} s after rank {peers.rank()} did, as long as the "
                "process group waits; expected the same rounds on all ranks: check that they iterate the same loader"
            )
    return waited


def _no_answer(who: str) -> WorkerError:
    return WorkerError(
        f"rank {peers.rank()} got no answer after its round: {who} has left the run, look there for the reason"
    )


class GroupExchange:
    """An exchange through an asynchronous all-gather, on its own gloo group so that its order never mixes with
    DDP's. Constructing it is collective."""

    def __init__(self, dtype: np.dtype[np.void]) -> None:
        self._dtype, self._timeout = dtype, peers.timeout()
        self._group = groups.take("gloo")
        self._open = True
        self._unreceived = 0  # rounds that this rank has sent and not received
        self._pending: dict[int, tuple[dist.Work, list[torch.Tensor]]] = {}

    def send(self, step: int, row: Row, lost: Lost = none_lost) -> None:
        mine = torch.frombuffer(bytearray(_bytes(row)), dtype=torch.float64)
        out = [torch.empty_like(mine) for _ in range(peers.ranks())]
        self._unreceived += 1
        self._pending[step] = (dist.all_gather(out, mine, group=self._group, async_op=True), out)
        self._pending.pop(step - SLOTS, None)  # of a round that was left

    def receive(self, step: int, lost: Lost = none_lost) -> Rows:
        (work, out), began = self._pending[step], time.monotonic()
        while not work.is_completed():
            _wait_on(began, self._timeout, lost, "another rank")
        del self._pending[step]
        try:
            work.wait()
        except RuntimeError as error:
            raise _no_answer("another rank") from error
        self._unreceived -= 1
        return torch.stack(out).numpy().view(self._dtype)[:, 0]

    def close(self) -> None:
        self._pending.clear()
        if self._open and not self._unreceived:  # else another rank may not take part in the next collective
            groups.give(self._group, "gloo")
        self._open = False


def _bytes(row: Row) -> bytes:
    return row if isinstance(row, bytes) else row.tobytes()


def connect(dtype: np.dtype[np.void]) -> Exchange:
    """The exchange of rows of this dtype that suits the default process group. Collective."""
    if peers.ranks() == 1:
        return OwnExchange(dtype)
    return MemoryExchange.of_all(dtype) or GroupExchange(dtype)
