"""Which samples, as places in the training set, a task gets, and what becomes of them if its gradient is not used."""

from __future__ import annotations

from typing import Any

import numpy as np

from paceline.errors import whole
from paceline.rounds import Indices


class Draws:
    """Samples drawn at random for each task, without end: the setting of the papers on backup workers.

    The draws of a worker's j-th task depend on (seed, worker, j) only.
    shards: split the training set at random into this many parts, one a worker; 1 lets all draw from all.
    """

    def __init__(self, samples: int, seed: int, shards: int = 1) -> None:
        self._seed, self._counts = seed, dict[int, int]()
        order = np.random.default_rng((seed, 0xD1)).permutation(samples) if shards > 1 else np.arange(samples)
        self._shards = np.array_split(order, shards)

    def take(self, worker: int, count: int) -> Indices:
        """Samples for a task."""
        number = self._counts.get(worker, 0)
        self._counts[worker] = number + 1
        shard = self._shards[worker % len(self._shards)]
        return shard[np.random.default_rng((self._seed, worker, number)).integers(len(shard), size=count)]

    def available(self) -> bool:
        """Whether ``take`` would give anything now."""
        return True

    def used(self, taken: Indices) -> None:
        """The task's gradient entered an update."""

    def give_back(self, taken: Indices) -> None:
        """The task's gradient was not used."""

    def finished(self) -> bool:
        """Whether all has been used that is to be used."""
        return False


class Epochs:
    """Every sample once an epoch, whatever is dropped: samples that come back are handed out again, first.

    samples: of the training set. epochs: how many. The order of an epoch is drawn from (seed, epoch). While a
    late task still holds samples of an epoch, the next one begins for the others.
    """

    def __init__(self, samples: int, epochs: int, seed: int) -> None:
        whole("samples", samples)
        whole("epochs", epochs)
        whole("seed", seed, 0, 2**63 - 1)
        self.samples, self.epochs, self._seed = samples, epochs, seed
        self.uses = np.zeros(samples, np.int64)  # of each sample, over the whole run
        self._begun = 0  # epochs
        self._fresh: list[Indices] = []  # what nobody has had of the newest
        self._back: list[Indices] = []
        self._done = 0

    def take(self, worker: int, count: int) -> Any:
        """Samples for a task, up to ``count``, which may be 0; None if there are none, perhaps only for now."""
        parts: list[Indices] = [] if count else [np.zeros(0, np.int64)]
        while count > 0 and self.available():
            if not self._back and not self._fresh:
                self._fresh.append(self._drawn(self._begun))
                self._begun += 1
            source = self._back or self._fresh
            part = source.pop(0)
            if len(part) > count:
                source.insert(0, part[count:])
            parts.append(part[:count])
            count -= len(parts[-1])
        return np.concatenate(parts) if parts else None

    def available(self) -> bool:
        return bool(self._back or self._fresh) or self._begun < self.epochs

    def used(self, taken: Indices) -> None:
        np.add.at(self.uses, taken, 1)
        self._done += len(taken)

    def give_back(self, taken: Indices) -> None:
        self._back.append(taken)

    def finished(self) -> bool:
        return self._done >= self.samples * self.epochs

    def state_dict(self) -> dict[str, Any]:
        """What must be kept to go on: samples out with workers count as not used."""
        return {"uses": self.uses.copy()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on: what an unfinished epoch has not used yet comes first."""
        self.uses = np.array(state["uses"], np.int64)
        self._done = int(self.uses.sum())
        self._begun, self._fresh, self._back = int(self.uses.max()), [], []
        for epoch in range(int(self.uses.min()), self._begun):
            order = self._drawn(epoch)
            missing = order[self.uses[order] <= epoch]
            if len(missing):
                self._back.append(missing)

    def _drawn(self, epoch: int) -> Indices:
        return np.random.default_rng((self._seed, epoch)).permutation(self.samples)


SampleSource = Draws | Epochs
