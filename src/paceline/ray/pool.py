"""Ray actors that hold coded blocks and multiply them: one per worker of a plan, shared by all its masters."""

from __future__ import annotations

import logging
import math
import os
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import ray

from paceline.costs import Array
from paceline.errors import PacelineError, number
from paceline.ray.start import START_SECONDS, Closing, controlled, signals_as_they_are

ProductDelay = Callable[[str, str, int, int], float]


class BlockWorker:
    """Holds coded blocks by matrix and multiplies them by x; ``cancel`` takes effect while it computes or sleeps."""

    def __init__(self, name: str, delay: ProductDelay | None) -> None:
        self.name, self.delay = name, delay
        self.blocks: dict[str, dict[int, Array]] = {}
        self.cancelled: dict[str, int] = {}
        self.changed = threading.Condition()

    def place(self, key: str, indices: Sequence[int], blocks: Array) -> None:
        """Store copies of blocks of a matrix."""
        mine = self.blocks.setdefault(key, {})
        for i, block in zip(indices, blocks, strict=True):
            mine[i] = np.array(block)

    def drop(self, key: str, indices: Sequence[int] | None = None) -> None:
        """Remove blocks of a matrix, all of them if ``indices`` is None."""
        if indices is None:
            self.blocks.pop(key, None)
            return
        for i in indices:
            self.blocks[key].pop(i, None)

    def multiply(self, key: str, turn: int, indices: Sequence[int], x: Array) -> tuple[Array, float] | None:
        """The products of the blocks with x, stacked, and the seconds they took; None if cancelled."""
        begin = time.perf_counter()
        if self._is_cancelled(key, turn):
            return None
        mine = self.blocks[key]
        products = np.stack([mine[i] @ x for i in indices])
        if self.delay is not None:
            rows = sum(len(mine[i]) for i in indices)
            late = begin + self.delay(self.name, key.partition("/")[0], turn, rows) - time.perf_counter()
            with self.changed:
                if self.changed.wait_for(lambda: self._is_cancelled(key, turn), max(late, 0.0)):
                    return None
        return products, time.perf_counter() - begin

    @ray.method(concurrency_group="control")
    def cancel(self, key: str, turn: int) -> None:
        """Cancel the products of a matrix up to this turn."""
        with self.changed:
            self.cancelled[key] = max(self.cancelled.get(key, -1), turn)
            self.changed.notify_all()

    @ray.method(concurrency_group="control")
    def process(self) -> int:
        """The process number, when the actor has started."""
        return os.getpid()

    def _is_cancelled(self, key: str, turn: int) -> bool:
        return self.cancelled.get(key, -1) >= turn


class WorkerPool(Closing):
    """Workers by name, each a Ray actor.

    workers: names as in the plan. cpus: CPUs that Ray reserves for each; 0 to start more workers than CPUs.
    delay: (worker, master, turn, rows) -> seconds that these rows take at least, to try out uneven speeds.

    Raises PacelineError for duplicate names, too few CPUs, and workers that do not start in time. Close it, or use it
    in a ``with`` statement, to end the actors.
    """

    def __init__(
        self,
        workers: Sequence[str],
        cpus: float = 1.0,
        delay: ProductDelay | None = None,
    ) -> None:
        number("cpus", cpus, "CPUs of each worker, 0 or more", lambda cpus: 0 <= cpus < math.inf)
        if len(set(workers)) < len(workers) or not workers:
            raise PacelineError(
                f"{len(workers)} workers, {len(set(workers))} different names: expected one each"
            )
        if not ray.is_initialized():
            with signals_as_they_are():
                ray.init(include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
        there = ray.cluster_resources().get("CPU", 0.0)
        if cpus * len(workers) > there:
            raise PacelineError(
                f"{len(workers)} workers of {cpus:g} CPUs each, and Ray has {there:g}: add nodes, or give cpus=0"
            )
        actor = controlled(BlockWorker)
        self.actors: dict[str, Any] = {
            name: actor.options(num_cpus=cpus, max_restarts=0).remote(name, delay) for name in workers
        }
        started = [each.process.remote() for each in self.actors.values()]
        _, waiting = ray.wait(started, num_returns=len(started), timeout=START_SECONDS)
        if waiting:
            self.close()
            raise PacelineError(
                f"{len(waiting)} of {len(workers)} workers did not start in {START_SECONDS:g} s; check Ray's cluster"
            )
        self.processes: dict[str, int] = dict(zip(self.actors, ray.get(started), strict=True))

    def close(self) -> None:
        """End the actors."""
        for each in self.actors.values():
            ray.kill(each)
        self.actors = {}
