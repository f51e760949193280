"""How the ranks' measurements travel: a few numbers a round, beside the gradients.

``send`` is called when a rank's gradients are ready, before its last bucket is reduced; ``receive`` after the
step. By then every rank has sent (its gradients could not have arrived otherwise), so nobody waits. A
key-value store is quicker than a collective while the ranks are few (measured with 4 ranks beside a gradient
all-reduce: 0.4 ms against 2.5 ms); a collective carries on where one store would become the bottleneck.

What travels is a row of numbers with names: a structured dtype whose fields are all float64, so that it is one array
of them on its way. Each exchange is made for one such dtype.

On a device the hosts run ahead of the reductions, so that a rank may well be waited for in ``receive``: for as long
as the process group waits in a collective.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Protocol

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from paceline.errors import WorkerError
from paceline.rounds import Array
from paceline.torch import peers
from paceline.torch.liveness.calls import Calls

STORE_RANKS = 32  # above this many ranks the store's one server would see n * n requests a round
CONNECT_SECONDS = 60.0  # to reach the store
CLOSING_SECONDS = 5.0  # how long rank 0 waits at the end for a rank that may have died
SLOTS = 4  # rounds whose keys may be alive at once; keys are reused, so that the store does not grow
GONE = "rank 0 has left the run, look there for the reason"


Rows = NDArray[np.void]  # of a structured dtype
Lost = Callable[[], WorkerError | None]


def nobody() -> WorkerError | None:
    """No rank is known to be lost."""
    return None


class Exchange(Protocol):
    """Gives every rank every rank's row."""

    def send(self, step: int, row: Rows) -> None:
        """Send this rank's row, shape (), for round ``step``; returns at once."""
        ...

    def receive(self, step: int, lost: Lost = nobody) -> Rows:
        """All ranks' rows for round ``step``, shape (n,); call after ``send`` of the same round.

        lost: asked while a rank is waited for; the error that it returns is raised.
        """
        ...

    def close(self) -> None:
        """The last round has been received; wait until that is so on the other ranks, too."""
        ...

    def abandon(self) -> None:
        """``close`` after a failure: nobody is waited for."""
        ...


class Alone:
    """One process: nobody to tell."""

    def __init__(self) -> None:
        self._rows: dict[int, Rows] = {}

    def send(self, step: int, row: Rows) -> None:
        self._rows[step % SLOTS] = row

    def receive(self, step: int, lost: Lost = nobody) -> Rows:
        return self._rows[step % SLOTS].reshape(1)

    def close(self) -> None:
        pass

    def abandon(self) -> None:
        pass


class StoreExchange:
    """Through a TCPStore of its own, which rank 0 hosts for as long as the run lasts.

    dtype: of a row. timeout: seconds to wait for a late rank, and for an answer of a rank 0 that may be stopped.
    """

    def __init__(self, dtype: np.dtype[np.void], timeout: float | None = None) -> None:
        self._rank, self._ranks = peers.rank(), peers.ranks()
        self._timeout = peers.timeout() if timeout is None else timeout
        self._dtype = dtype
        nothing = self._message(-1, np.zeros((), dtype))
        # Every key is there from the beginning: an answer never waits for a rank, which no deadline could end.
        first = {f"{rank}/{slot}": nothing for rank in range(self._ranks) for slot in range(SLOTS)}
        self._store: dist.TCPStore | None = peers.own_store(CONNECT_SECONDS, first)
        self._calls = Calls("exchange")

    def send(self, step: int, row: Rows) -> None:
        assert self._store is not None
        message = self._message(step, row)
        try:
            self._store.set(f"{self._rank}/{step % SLOTS}", message)  # type: ignore[arg-type]  # bytes are what it keeps
        except dist.DistError as error:
            raise WorkerError(f"rank {self._rank} cannot tell its speed: {GONE}") from error

    def receive(self, step: int, lost: Lost = nobody) -> Rows:
        assert self._store is not None
        keys = [f"{rank}/{step % SLOTS}" for rank in range(self._ranks)]
        began = time.monotonic()
        while True:
            messages = np.frombuffer(b"".join(self._ask(keys))).reshape(self._ranks, -1)
            late = np.flatnonzero(messages[:, 0] != step)
            if not late.size:
                return _named(messages[:, 1:].copy(), self._dtype)
            if (error := lost()) is not None:
                raise error
            waited = time.monotonic() - began
            if waited > self._timeout:
                raise WorkerError(
                    f"rank {late[0]} has not told of its round {waited:.0f} s after rank {self._rank} did, as long "
                    "as the process group waits; expected every rank to take the same rounds: look at that rank for "
                    "what holds it up, and check that all ranks iterate the same loader"
                )
            # A rank whose hook did not fire sends right after its backward; on a device one may be minutes late.
            time.sleep(min(max(0.0005, waited / 20), 0.05))

    def _message(self, step: int, row: Rows) -> bytes:
        return np.float64(step).tobytes() + row.tobytes()

    def abandon(self) -> None:
        """There is nothing more to tell the others; they need not be waited for."""
        self._store = None
        self._calls.close()

    def close(self) -> None:
        if self._store is None:
            return
        with contextlib.suppress(RuntimeError, TimeoutError):  # rank 0 is gone already, or does not answer
            self._calls.within(CLOSING_SECONDS + 1, self._leave, self._store)
        self.abandon()

    def _leave(self, store: dist.TCPStore) -> None:
        store.add("closed", 1)
        deadline = time.monotonic() + CLOSING_SECONDS
        # The store lives in rank 0, and a slower rank may still be reading its last round from it.
        while self._rank == 0 and store.add("closed", 0) < self._ranks and time.monotonic() < deadline:
            time.sleep(0.001)

    def _ask(self, keys: list[str]) -> list[bytes]:
        assert self._store is not None
        try:
            if self._rank == 0:  # the store is in this very process, and cannot be stopped alone
                return self._store.multi_get(keys)
            return self._calls.within(self._timeout, self._store.multi_get, keys)
        except dist.DistError as error:
            raise WorkerError(f"rank {self._rank} got no answer after its round: {GONE}") from error
        except TimeoutError:
            raise WorkerError(
                f"rank 0 has not answered rank {self._rank} for {self._timeout:.0f} s, as long as the process group "
                "waits; it may be stopped or cut off: end the run and go on from the last checkpoint"
            ) from None


class GroupExchange:
    """Through an asynchronous all-gather on a gloo group of its own, so that its order never mixes with DDP's."""

    def __init__(self, dtype: np.dtype[np.void], ranks: int) -> None:
        self._dtype = dtype
        self._group = dist.new_group(backend="gloo", timeout=timedelta(seconds=peers.timeout()))
        self._ranks = ranks
        self._pending: dict[int, tuple[dist.Work, list[torch.Tensor]]] = {}

    def send(self, step: int, row: Rows) -> None:
        mine = torch.from_numpy(row.reshape(1).view(np.float64))
        out = [torch.empty_like(mine) for _ in range(self._ranks)]
        self._pending[step] = (dist.all_gather(out, mine, group=self._group, async_op=True), out)

    def receive(self, step: int, lost: Lost = nobody) -> Rows:
        work, out = self._pending.pop(step)
        work.wait()
        return _named(torch.stack(out).numpy(), self._dtype)

    def close(self) -> None:
        self._pending.clear()

    abandon = close


def _named(numbers: Array, dtype: np.dtype[np.void]) -> Rows:
    """The rows that these numbers are, (n, k)."""
    return numbers.view(dtype)[:, 0]


def connect(dtype: np.dtype[np.void]) -> Exchange:
    """The exchange of such rows that suits the size of the default process group."""
    ranks = peers.ranks()
    if ranks == 1:
        return Alone()
    return StoreExchange(dtype) if ranks <= STORE_RANKS else GroupExchange(dtype, ranks)
