"""How the ranks' measurements travel: a few numbers a round, beside the gradients.

``send`` is called when a rank's gradients are ready, just before or after the sum of its last bucket begins;
``receive`` after the step. By then every rank has sent, or is about to (its gradients could not have arrived
otherwise), so nobody waits longer than a moment. While the ranks
are few, each tells every other: those of its machine in memory that they share, and the rest by a connection to each,
which costs two system calls. A collective carries on where connections would be many, or cannot be made.

What travels is a row of numbers with names: a structured dtype whose fields are all float64, so that it is one array
of them on its way. Each exchange is made for one such dtype.

On a device the hosts run ahead of the reductions, so that a rank may well be waited for in ``receive``: for as long
as the process group waits in a collective.
"""

from __future__ import annotations

import logging
import os
import socket
import struct
import time
import weakref
from collections.abc import Callable
from datetime import timedelta
from typing import Protocol

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from paceline.errors import PacelineError, WorkerError
from paceline.rounds import Array
from paceline.torch import peers
from paceline.torch.measuring import mesh
from paceline.torch.measuring.nearby import Nearby

_log = logging.getLogger(__name__)
MESH_RANKS = 64  # above this many ranks each would have to meet too many others by itself
SLOTS = 4  # rounds of which a rank may have told and not yet asked
LOOK_SECONDS = 0.05  # at most, between two looks for a rank that is waited for
SOON_SECONDS = 1e-4  # the same of a rank of this machine, at first
SOON = 1 / 8  # and later, as a part of its wait
LATE_SECONDS = 1e-3  # before that, a rank of this machine is about to tell
CLOSED = "the connection was closed"
STEP = struct.Struct("<d")  # before each row: the round that it is of


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
        """The last round has been received."""
        ...

    def abandon(self) -> None:
        """``close`` after a failure: nobody is waited for."""
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

    def abandon(self) -> None:
        pass


class MeshExchange:
    """From every rank to every other: in memory that they share, or through a connection. Constructing it is
    collective.

    dtype: of a row. timeout: seconds to wait for a late rank.
    Raises PacelineError, on every rank, where one cannot be reached.
    """

    def __init__(self, dtype: np.dtype[np.void], timeout: float | None = None) -> None:
        self._rank = peers.rank()
        self._timeout = peers.timeout() if timeout is None else timeout
        self._dtype, self._size = dtype, STEP.size + dtype.itemsize
        self._others = mesh.meet()
        self._nearby = Nearby(SLOTS, self._size)
        self._far = {rank: other for rank, other in self._others.items() if rank not in self._nearby.ranks}
        self._held = dict.fromkeys(self._far, b"")  # what came of a later message, or of a part of one
        self._own = [b""] * SLOTS
        self._end = weakref.finalize(self, mesh.part, self._others, os.getpid())

    def send(self, step: int, row: Row) -> None:
        self._own[step % SLOTS] = own = _bytes(row)
        message = STEP.pack(step) + own
        self._nearby.tell(step, message)
        for rank, other in self._far.items():
            try:
                sent = other.send(message)
            except BlockingIOError:
                sent = 0
            except OSError:  # it has left, of which ``receive`` tells
                continue
            if sent < len(message):
                self._send_rest(rank, other, message[sent:])

    def receive(self, step: int, lost: Lost = nobody) -> Rows:
        head, size, rows = STEP.pack(step), self._size, []
        for rank, other in self._others.items():
            if rank not in self._far:
                message = self._nearby.hear(rank, step)
                if not message.startswith(head):
                    message = self._wait_nearby(rank, step, lost)
            else:
                try:
                    message = b"" if self._held[rank] else other.recv(size)
                except OSError:
                    message = b""
                if not (len(message) == size and message.startswith(head)):
                    message = self._wait(rank, step, message, lost)
            rows.append(message[STEP.size : size])
        rows.insert(self._rank, self._own[step % SLOTS])
        return np.frombuffer(bytearray().join(rows), self._dtype)

    def close(self) -> None:
        """Nobody need be waited for: what was sent is on its way."""
        self._end()

    abandon = close

    def _wait(self, rank: int, step: int, message: bytes, lost: Lost) -> bytes:
        """The rank's message of round ``step``, of which this part is here."""
        began = time.monotonic()
        message = self._held[rank] + message
        while True:
            while len(message) >= self._size and STEP.unpack_from(message)[0] < step:
                message = message[self._size :]  # of a round that was left
            self._held[rank] = message
            if len(message) >= self._size and STEP.unpack_from(message)[0] == step:
                self._held[rank] = message[self._size :]
                return message[: self._size]
            waited = self._waited(rank, began, lost)
            if len(message) < self._size:
                mesh.wait_for(self._others[rank], min(self._timeout - waited, LOOK_SECONDS))
                message += self._more(rank, self._size - len(message))
            else:  # it is further, and will not tell of this round any more
                time.sleep(LOOK_SECONDS)

    def _wait_nearby(self, rank: int, step: int, lost: Lost) -> bytes:
        """The same of a rank of this machine."""
        began, head, ended = time.monotonic(), STEP.pack(step), False
        while not (message := self._nearby.hear(rank, step)).startswith(head):
            if ended:
                raise self._left(rank) from dist.DistNetworkError(CLOSED)
            waited = time.monotonic() - began
            time.sleep(min(max(SOON * waited, SOON_SECONDS), LOOK_SECONDS))
            if waited > LATE_SECONDS:
                self._waited(rank, began, lost)
                ended = self._ended(rank)
        return message

    def _ended(self, rank: int) -> bool:
        """Whether a rank of this machine has closed its connection, by which it never tells anything."""
        try:
            return not self._others[rank].recv(1)
        except BlockingIOError:
            return False
        except OSError:
            return True

    def _waited(self, rank: int, began: float, lost: Lost) -> float:
        """Seconds for which this rank has waited for the other. Raises WorkerError where it need not any longer."""
        if (error := lost()) is not None:
            raise error
        waited = time.monotonic() - began
        if waited > self._timeout:
            raise WorkerError(
                f"rank {rank} has not told of its round {waited:.0f} s after rank {self._rank} did, as long "
                "as the process group waits; expected every rank to take the same rounds: look at that rank for "
                "what holds it up, and check that all ranks iterate the same loader"
            )
        return waited

    def _more(self, rank: int, size: int) -> bytes:
        try:
            more = self._others[rank].recv(size)
        except BlockingIOError:
            return b""
        except OSError as error:
            raise self._left(rank) from dist.DistNetworkError(str(error))
        if not more:
            raise self._left(rank) from dist.DistNetworkError(CLOSED)
        return more

    def _left(self, rank: int) -> WorkerError:
        return WorkerError(
            f"rank {self._rank} got no answer after its round: rank {rank} has left the run, look there for "
            "the reason"
        )

    def _send_rest(self, rank: int, other: socket.socket, message: bytes) -> None:
        """The system's buffers are full: the other rank has not read for long."""
        other.settimeout(self._timeout)
        try:
            other.sendall(message)
        except TimeoutError:
            raise WorkerError(
                f"rank {rank} has not read for {self._timeout:.0f} s what rank {self._rank} told, as long as the "
                "process group waits; it may be stopped or cut off: end the run and go on from the last checkpoint"
            ) from None
        except OSError:  # it has left, of which ``receive`` tells
            return
        other.setblocking(False)


class GroupExchange:
    """Through an asynchronous all-gather on a gloo group of its own, so that its order never mixes with DDP's."""

    def __init__(self, dtype: np.dtype[np.void], ranks: int) -> None:
        self._dtype = dtype
        self._group = dist.new_group(backend="gloo", timeout=timedelta(seconds=peers.timeout()))
        self._ranks = ranks
        self._pending: dict[int, tuple[dist.Work, list[torch.Tensor]]] = {}

    def send(self, step: int, row: Row) -> None:
        mine = torch.frombuffer(bytearray(_bytes(row)), dtype=torch.float64)
        out = [torch.empty_like(mine) for _ in range(self._ranks)]
        self._pending[step] = (dist.all_gather(out, mine, group=self._group, async_op=True), out)

    def receive(self, step: int, lost: Lost = nobody) -> Rows:
        work, out = self._pending.pop(step)
        work.wait()
        return _named(torch.stack(out).numpy(), self._dtype)

    def close(self) -> None:
        self._pending.clear()

    abandon = close


def _bytes(row: Row) -> bytes:
    return row if isinstance(row, bytes) else row.tobytes()


def _named(numbers: Array, dtype: np.dtype[np.void]) -> Rows:
    """The rows that these numbers are, (n, k)."""
    return numbers.view(dtype)[:, 0]


def connect(dtype: np.dtype[np.void]) -> Exchange:
    """The exchange of such rows that suits the size of the default process group."""
    ranks = peers.ranks()
    if ranks == 1:
        return Alone(dtype)
    if ranks <= MESH_RANKS:
        try:
            return MeshExchange(dtype)
        except PacelineError as error:
            _log.warning("the ranks tell their speeds by collectives, which takes longer: %s", error)
    return GroupExchange(dtype, ranks)
