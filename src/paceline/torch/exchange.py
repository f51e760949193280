"""How the ranks' measurements travel: a few numbers a round, beside the gradients.

``send`` is called when a rank's gradients are ready, before its last bucket is reduced; ``receive`` after the
step. By then every rank has sent (its gradients could not have arrived otherwise), so nobody waits. A
key-value store is quicker than a collective while the ranks are few (measured with 4 ranks beside a gradient
all-reduce: 0.4 ms against 2.5 ms); a collective carries on where one store would become the bottleneck.
"""

from __future__ import annotations

import time
from typing import Protocol

import numpy as np
import torch
import torch.distributed as dist

from paceline.errors import PacelineError, WorkerError
from paceline.rounds import Array
from paceline.torch import peers

STORE_RANKS = 32  # above this many ranks the store's one server would see n * n requests a round
CLOSING_SECONDS = 5.0  # how long rank 0 waits at the end for a rank that may have died
SLOTS = 4  # rounds whose keys may be alive at once; keys are reused, so that the store does not grow


class Exchange(Protocol):
    """Gives every rank every rank's numbers."""

    def send(self, step: int, values: Array) -> None:
        """Send this rank's numbers, shape (k,), for round ``step``; returns at once."""
        ...

    def receive(self, step: int) -> Array:
        """All ranks' numbers for round ``step``, shape (n, k); call after ``send`` of the same round."""
        ...

    def close(self) -> None: ...


class Alone:
    """One process: nobody to tell."""

    def __init__(self) -> None:
        self._values: dict[int, Array] = {}

    def send(self, step: int, values: Array) -> None:
        self._values[step % SLOTS] = values

    def receive(self, step: int) -> Array:
        return self._values[step % SLOTS][None, :]

    def close(self) -> None:
        pass


class StoreExchange:
    """Through a TCPStore of its own, which rank 0 hosts for as long as the run lasts."""

    def __init__(self, timeout: float = 60.0) -> None:
        self._rank, self._ranks, self._timeout = peers.rank(), peers.ranks(), timeout
        self._store: dist.TCPStore | None = peers.own_store(timeout)

    def send(self, step: int, values: Array) -> None:
        assert self._store is not None
        payload = np.concatenate([[float(step)], values])
        self._store.set(f"{self._rank}/{step % SLOTS}", payload.tobytes())  # type: ignore[arg-type]  # bytes are what it keeps

    def receive(self, step: int) -> Array:
        assert self._store is not None
        keys = [f"{rank}/{step % SLOTS}" for rank in range(self._ranks)]
        deadline = time.monotonic() + self._timeout
        while True:
            try:
                rows = np.stack([np.frombuffer(raw) for raw in self._store.multi_get(keys)])
            except dist.DistError as error:
                raise WorkerError(
                    f"rank {self._rank} got no answer from rank 0 after its round; rank 0 has left the run, look "
                    "there for the reason"
                ) from error
            late = np.flatnonzero(rows[:, 0] != step)
            if not late.size:
                return rows[:, 1:]
            if time.monotonic() > deadline:
                raise PacelineError(
                    f"rank {late[0]} is at round {rows[late[0], 0]:g} while this rank is at round {step}; expected "
                    "every rank to take the same rounds: check that all ranks iterate the same loader"
                )
            time.sleep(0.0005)  # a rank whose hook did not fire sends right after its backward

    def missing(self, step: int) -> list[int]:
        """Ranks that have not sent for round ``step``; rank 0, which hosts the store, where that does not answer."""
        if self._store is None:
            return []
        slot = step % SLOTS
        try:
            return [
                rank
                for rank in range(self._ranks)
                if not self._store.check([f"{rank}/{slot}"])
                or np.frombuffer(self._store.get(f"{rank}/{slot}"))[0] < step
            ]
        except (RuntimeError, dist.DistError):
            return [0]

    def close(self) -> None:
        if self._store is None:
            return
        try:
            self._store.add("closed", 1)
            deadline = time.monotonic() + CLOSING_SECONDS
            # The store lives in rank 0, and a slower rank may still be reading its last round from it.
            while (
                self._rank == 0 and self._store.add("closed", 0) < self._ranks and time.monotonic() < deadline
            ):
                time.sleep(0.001)
        except (RuntimeError, dist.DistError):
            pass  # rank 0 is gone already; there is nothing left to say goodbye to
        self._store = None


class GroupExchange:
    """Through an asynchronous all-gather on a gloo group of its own, so that its order never mixes with DDP's."""

    def __init__(self, ranks: int) -> None:
        self._group = dist.new_group(backend="gloo")
        self._ranks = ranks
        self._pending: dict[int, tuple[dist.Work, list[torch.Tensor]]] = {}

    def send(self, step: int, values: Array) -> None:
        mine = torch.from_numpy(values)
        out = [torch.empty_like(mine) for _ in range(self._ranks)]
        self._pending[step] = (dist.all_gather(out, mine, group=self._group, async_op=True), out)

    def receive(self, step: int) -> Array:
        work, out = self._pending.pop(step)
        work.wait()
        return torch.stack(out).numpy()

    def close(self) -> None:
        self._pending.clear()


def connect() -> Exchange:
    """The exchange that suits the size of the default process group."""
    ranks = peers.ranks()
    if ranks == 1:
        return Alone()
    return StoreExchange() if ranks <= STORE_RANKS else GroupExchange(ranks)
