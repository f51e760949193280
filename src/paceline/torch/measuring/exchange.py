"""How the ranks' measurements travel: a few numbers a round, beside the gradients.

``send`` is called when a rank's gradients are ready, before its last bucket is reduced; ``receive`` after the
step. By then every rank has sent (its gradients could not have arrived otherwise), so nobody waits. A
key-value store is quicker than a collective while the ranks are few (measured with 4 ranks beside a gradient
all-reduce: 0.4 ms against 2.5 ms); a collective carries on where one store would become the bottleneck.

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

from paceline.errors import WorkerError
from paceline.rounds import Array
from paceline.torch import peers
from paceline.torch.liveness.calls import Calls

STORE_RANKS = 32  # above this many ranks the store's one server would see n * n requests a round
CONNECT_SECONDS = 60.0  # to reach the store
CLOSING_SECONDS = 5.0  # how long rank 0 waits at the end for a rank that may have died
SLOTS = 4  # rounds whose keys may be alive at once; keys are reused, so that the store does not grow
GONE = "rank 0 has left the run, look there for the reason"


Lost = Callable[[], WorkerError | None]


def nobody() -> WorkerError | None:
    """No rank is known to be lost."""
    return None


class Exchange(Protocol):
    """Gives every rank every rank's numbers."""

    def send(self, step: int, values: Array) -> None:
        """Send this rank's numbers, shape (k,), for round ``step``; returns at once."""
        ...

    def receive(self, step: int, lost: Lost = nobody) -> Array:
        """All ranks' numbers for round ``step``, shape (n, k); call after ``send`` of the same round.

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
        self._values: dict[int, Array] = {}

    def send(self, step: int, values: Array) -> None:
        self._values[step % SLOTS] = values

    def receive(self, step: int, lost: Lost = nobody) -> Array:
        return self._values[step % SLOTS][None, :]

    def close(self) -> None:
        pass

    def abandon(self) -> None:
        pass


class StoreExchange:
    """Through a TCPStore of its own, which rank 0 hosts for as long as the run lasts.

    timeout: seconds to wait for a late rank, and for an answer of a rank 0 that may be stopped.
    """

    def __init__(self, timeout: float | None = None) -> None:
        self._rank, self._ranks = peers.rank(), peers.ranks()
        self._timeout = peers.timeout() if timeout is None else timeout
        nothing = np.array([-1.0]).tobytes()
        # Every key is there from the beginning: an answer never waits for a rank, which no deadline could end.
        first = {f"{rank}/{slot}": nothing for rank in range(self._ranks) for slot in range(SLOTS)}
        self._store: dist.TCPStore | None = peers.own_store(CONNECT_SECONDS, first)
        self._calls = Calls("exchange")

    def send(self, step: int, values: Array) -> None:
        assert self._store is not None
        payload = np.concatenate([[float(step)], values])
        try:
            self._store.set(f"{self._rank}/{step % SLOTS}", payload.tobytes())  # type: ignore[arg-type]  # bytes are what it keeps
        except dist.DistError as error:
            raise WorkerError(f"rank {self._rank} cannot tell its speed: {GONE}") from error

    def receive(self, step: int, lost: Lost = nobody) -> Array:
        assert self._store is not None
        keys = [f"{rank}/{step % SLOTS}" for rank in range(self._ranks)]
        began = time.monotonic()
        while True:
            raws = self._ask(keys)
            late = [rank for rank, raw in enumerate(raws) if np.frombuffer(raw, count=1)[0] != step]
            if not late:
                return np.stack([np.frombuffer(raw)[1:] for raw in raws])
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

    def __init__(self, ranks: int) -> None:
        self._group = dist.new_group(backend="gloo", timeout=timedelta(seconds=peers.timeout()))
        self._ranks = ranks
        self._pending: dict[int, tuple[dist.Work, list[torch.Tensor]]] = {}

    def send(self, step: int, values: Array) -> None:
        mine = torch.from_numpy(values)
        out = [torch.empty_like(mine) for _ in range(self._ranks)]
        self._pending[step] = (dist.all_gather(out, mine, group=self._group, async_op=True), out)

    def receive(self, step: int, lost: Lost = nobody) -> Array:
        work, out = self._pending.pop(step)
        work.wait()
        return torch.stack(out).numpy()

    def close(self) -> None:
        self._pending.clear()

    abandon = close


def connect() -> Exchange:
    """The exchange that suits the size of the default process group."""
    ranks = peers.ranks()
    if ranks == 1:
        return Alone()
    return StoreExchange() if ranks <= STORE_RANKS else GroupExchange(ranks)
