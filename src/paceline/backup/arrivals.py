"""Who arrived when: the bookkeeping that turns an engine's events into time samples for a backup policy."""

from __future__ import annotations

import numpy as np

from paceline.backup.protocol import Timings


class Arrivals:
    """Feeds ``Timings``: tell it of each update and each gradient, late ones included.

    A version is forgotten when as many of its gradients as there are workers have come.
    """

    def __init__(self, workers: int) -> None:
        self._workers = workers
        self._versions = {0: (0.0, workers, 0)}  # when it was made, h, how many have come
        self._samples: list[tuple[int, int, float, int, float]] = []

    def updated(self, version: int, now: float, quorum: int) -> None:
        """The parameters became ``version`` at ``now`` (seconds), from ``quorum`` gradients."""
        self._versions[version] = (now, quorum, 0)
        for old in [v for v in self._versions if v < version - 4 * self._workers]:
            del self._versions[old]

    def arrived(self, worker: int, version: int, now: float, trip: float) -> None:
        """A gradient for ``version`` came at ``now``; the worker's round trip took ``trip`` seconds."""
        if version not in self._versions:
            return
        made, quorum, count = self._versions[version]
        self._versions[version] = (made, quorum, count + 1)
        self._samples.append((quorum, count + 1, now - made, worker, trip))

    def take(self) -> Timings:
        """The samples since the last call."""
        taken, self._samples = self._samples, []
        columns = np.array(taken, float).reshape(-1, 5).T
        before, place, worker = (columns[i].astype(np.int64) for i in (0, 1, 3))
        return Timings(before, place, columns[2], worker, columns[4])
