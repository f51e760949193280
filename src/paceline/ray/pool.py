"""Ray actors that hold coded blocks and multiply them: one per worker of a plan, shared by all its masters."""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import ray

from paceline.costs import Array
from paceline.errors import PacelineError, number, whole
from paceline.files import write_whole
from paceline.ray.start import START_SECONDS, Closing, controlled, init

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

    Close it, or use it in a ``with`` statement, to end the actors.

    Args:
        workers: Names as in the plan.
        cpus: CPUs that Ray reserves for each; 0 to start more workers than CPUs.
        delay: (worker, master, turn, rows) -> seconds that these rows take at least, to try out uneven speeds.
        options: For some workers, by name, the options of their Ray actors, as ``resources={"node:10.0.0.5": 0.01}``
            or ``scheduling_strategy=NodeAffinitySchedulingStrategy(...)``: a plan's worker is a machine with its
            speed.

    Raises:
        PacelineError: For duplicate names, too few CPUs, and workers that do not start in time.
    """

    def __init__(
        self,
        workers: Sequence[str],
        cpus: float = 1.0,
        delay: ProductDelay | None = None,
        options: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> None:
        number("cpus", cpus, "CPUs of each worker, 0 or more", lambda cpus: 0 <= cpus < math.inf)
        if len(set(workers)) < len(workers) or not workers:
            raise PacelineError(
                f"{len(workers)} workers, {len(set(workers))} different names: expected one each"
            )
        if unknown := [name for name in options or {} if name not in workers]:
            raise PacelineError(f"options for worker {unknown[0]!r}: expected one of {', '.join(workers)}")
        if not ray.is_initialized():
            init()
        there = ray.cluster_resources().get("CPU", 0.0)
        if cpus * len(workers) > there:
            raise PacelineError(
                f"{len(workers)} workers of {cpus:g} CPUs each, and Ray has {there:g}: add nodes, or give cpus=0"
            )
        self.cpus, self.delay, self.options = cpus, delay, dict(options or {})
        self.actors: dict[str, Any] = {}
        self.processes: dict[str, int] = {}
        self._start(workers)

    def replace(self, name: str, options: Mapping[str, Any] | None = None) -> None:
        """End a worker, if it still runs, and start another of this name; coded matrices place its blocks again.

        Args:
            name: The worker's name.
            options: Of the new actor, as for the pool; None keeps those of the old one.

        Raises:
            PacelineError: For an unknown name, and if the worker does not start in time.
        """
        if name not in self.actors:
            raise PacelineError(
                f"worker {name!r} is not in the pool: expected one of {', '.join(self.actors)}"
            )
        if options is not None:
            self.options[name] = options
        ray.kill(self.actors[name])
        self._start([name])

    def _start(self, names: Sequence[str]) -> None:
        actor = controlled(BlockWorker)
        for name in names:
            options = {"num_cpus": self.cpus, "max_restarts": 0, **self.options.get(name, {})}
            self.actors[name] = actor.options(**options).remote(name, self.delay)
        started = [self.actors[name].process.remote() for name in names]
        _, waiting = ray.wait(started, num_returns=len(started), timeout=START_SECONDS)
        if waiting:
            missing = ", ".join(name for name, each in zip(names, started, strict=True) if each in waiting)
            self.close()
            raise PacelineError(
                f"{missing} did not start in {START_SECONDS:g} s; check Ray's cluster, and the workers' options"
            )
        self.processes.update(zip(names, ray.get(started), strict=True))

    def close(self) -> None:
        """End the actors."""
        for each in self.actors.values():
            ray.kill(each)
        self.actors = {}


def measure(
    pool: WorkerPool, matrices: Mapping[str, Array], path: Path, portion: float = 0.1, products: int = 10
) -> None:
    """Write the times of products on the workers of a pool, as ``paceline plan --fit`` reads them.

    Every worker multiplies a portion of each master's rows, all workers at the same time, as in a coded product.

    Args:
        pool: The workers.
        matrices: By master, shape (L, columns).
        path: The CSV file.
        portion: Of L, the rows of each product.
        products: Products of each worker, 2 or more.

    Raises:
        PacelineError: For a portion or a number out of range.
    """
    number("portion", portion, "a portion above 0, at most 1", lambda part: 0 < part <= 1)
    whole("products", products, 2)
    lines = ["master,worker,rows,milliseconds"]
    for master, a in matrices.items():
        rows = max(int(portion * len(a)), 1)
        key, block, x = f"{master}/measure", ray.put(np.array(a[None, :rows])), np.ones(a.shape[1], a.dtype)
        ray.get([actor.place.remote(key, [0], block) for actor in pool.actors.values()])
        for turn in range(-1, products):  # the first product warms up
            answers = [actor.multiply.remote(key, max(turn, 0), [0], x) for actor in pool.actors.values()]
            if turn >= 0:
                took = [1000 * seconds for _, seconds in ray.get(answers)]
                lines += [f"{master},{n},{rows},{ms:.6g}" for n, ms in zip(pool.actors, took, strict=True)]
            else:
                ray.get(answers)
        for actor in pool.actors.values():
            actor.drop.remote(key)
    write_whole(path, "\n".join(lines) + "\n")
