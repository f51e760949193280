"""The sources of tasks' samples, as positions in the training set; samples whose gradient is not used come back."""

from __future__ import annotations

from typing import Any

import numpy as np

from paceline.errors import whole
from paceline.rounds import Indices


class Draws:
    """Samples drawn at random for each task, without end, as in the papers on backup workers.

    The draws of a worker's j-th task only depend on (seed, worker, j).
    shards: the number of random parts of the training set, one per worker; with 1, all draw from the whole set.
    """

    def __init__(self, samples: int, seed: int, shards: int = 1) -> None:
        self._seed, self._counts = seed, dict[int, int]()
        order = np.random.default_rng((seed, 0xD1)).permutation(samples) if shards > 1 else np.arange(samples)
        self._shards = np.array_split(order, shards)

    def take(self, worker: int, count: int) -> Indices:
        """The samples for a task."""
        number = self._counts.get(worker, 0)
        self._counts[worker] = number + 1
        shard = self._shards[worker % len(self._shards)]
        return shard[np.random.default_rng((self._seed, worker, number)).integers(len(shard), size=count)]

    def available(self) -> bool:
        """Whether ``take`` would return samples now."""
        return True

    def used(self, taken: Indices) -> None:
        """Note that the task's gradient was used in an update."""

    def give_back(self, taken: Indices) -> None:
        """Take back the samples of a task whose gradient was not used."""

    def finished(self) -> bool:
        """Whether all samples have been used."""
        return False


class Epochs:
    """Each sample once per epoch, even if gradients are dropped: samples that come back are handed out again, first.

    samples: of the training set. epochs: their number. The order of an epoch is drawn from (seed, epoch). While a
    late task still holds samples of an epoch, the next epoch begins for the others. pairs: leave no single sample for
    the last task, as batch norm needs it.
    """

    def __init__(self, samples: int, epochs: int, seed: int, pairs: bool = False) -> None:
        whole("samples", samples)
        whole("epochs", epochs)
        whole("seed", seed, 0, 2**63 - 1)
        self.samples, self.epochs, self._seed, self._pairs = samples, epochs, seed, pairs
        self.uses = np.zeros(samples, np.int64)  # of each sample, over the whole run
        self._begun = 0  # epochs
        self._fresh: list[Indices] = []  # samples of the newest epoch that were not handed out yet
        self._back: list[Indices] = []
        self._done = 0

    def take(self, worker: int, count: int) -> Any:
        """The samples for a task, up to ``count``, which may be 0; None if there are none, at least for now."""
        if self._pairs and count > 1 and self._left() - count == 1:
            count += 1 if count == 2 else -1  # one more only if one less would leave a single sample here
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
        """The state from which to continue: samples of unfinished tasks count as not used."""
        return {"uses": self.uses.copy()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a state; the samples that an unfinished epoch has not used yet come first."""
        self.uses = np.array(state["uses"], np.int64)
        self._done = int(self.uses.sum())
        self._begun, self._fresh, self._back = int(self.uses.max()), [], []
        for epoch in range(int(self.uses.min()), self._begun):
            order = self._drawn(epoch)
            missing = order[self.uses[order] <= epoch]
            if len(missing):
                self._back.append(missing)

    def _left(self) -> int:
        """Samples that can be handed out now, of all epochs."""
        return sum(map(len, (*self._back, *self._fresh))) + (self.epochs - self._begun) * self.samples

    def _drawn(self, epoch: int) -> Indices:
        return np.random.default_rng((self._seed, epoch)).permutation(self.samples)


SampleSource = Draws | Epochs
