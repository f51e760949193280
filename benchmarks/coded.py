"""Who finishes coded products first on real Ray workers with sleeping stalls?

Two masters share 12 workers (``--workers``); worker n sleeps rows x (a + E / u) ms for master m, E drawn
for each product, the same for every contender. Mean, 98 % and worst of the time until both masters have their
product, against Ray task queues over small blocks, in which each worker takes the next block when it is free, and
against the work queue's ideal on the same draws (perfect balance, no messages). All contenders take turns.
"""

from __future__ import annotations

import logging
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import ray
from scaffold import command_line, progress

from paceline.coded import CodedPlan, Problem, ShiftedExponential, plan, simulate, stretched
from paceline.coded.codes import own_block
from paceline.ray import CodedMatrix, WorkerPool

ROWS, COLUMNS = 1200, 64
SMALL_BLOCKS = (30, 60, 120)  # of each master, for the task queue
CHUNK = 10  # products that a contender makes in a row


def cluster(workers: int, rate: float, seed: int) -> Problem:
    u = np.random.default_rng(seed).uniform(1, 5, (2, workers)) * rate
    names = tuple(f"w{n}" for n in range(workers))
    return Problem(("x", "y"), names, np.full(2, float(ROWS)), ShiftedExponential(u, 1 / u))


def row_time(problem: Problem, master: int, worker: int, turn: int) -> float:
    """Milliseconds for a row in a turn."""
    draw = np.random.default_rng([master, worker, turn]).exponential()
    delay = problem.delay
    assert isinstance(delay, ShiftedExponential)
    return float(delay.a[master, worker] + draw / delay.u[master, worker])


class Coded:
    """Both masters' products at once, by a plan."""

    def __init__(
        self, made: CodedPlan, pool: WorkerPool, matrices: list[np.ndarray], x: np.ndarray, messages: int = 1
    ) -> None:
        self.x, self.expected = x, [a @ x for a in matrices]
        self.both = [CodedMatrix(a, made, m, pool, messages=messages) for m, a in enumerate(matrices)]
        self.copies = float(made.copies.mean())
        self.model = simulate(made, 20_000, np.random.default_rng(0), messages).mean().value

    def product(self, turn: int) -> float:
        """Seconds of a product."""
        with ThreadPoolExecutor(2) as threads:
            for each in self.both:
                each.turn = turn - 1  # the next turn is this one: all contenders have the same draws
            start = time.perf_counter()
            products = list(threads.map(lambda each: each @ self.x, self.both))
            taken = time.perf_counter() - start
        for y, right in zip(products, self.expected, strict=True):
            assert np.linalg.norm(y - right) < 1e-9 * np.linalg.norm(right)
        return taken


class TaskQueue:
    """The next small block goes to the next free worker; every worker holds every block.

    ahead: blocks that a worker has at a time; with 2, it computes one while the next is on its way. 1 is what
    ``ray.util.ActorPool.map_unordered`` does.
    """

    model = None

    def __init__(
        self, count: int, ahead: int, pool: WorkerPool, matrices: list[np.ndarray], x: np.ndarray
    ) -> None:
        self.keys = [f"{name}/queue of {count}" for name in "xy"]
        self.actors, self.x, self.ahead, self.count = list(pool.actors.values()), x, ahead, count
        self.expected, self.copies = [a @ x for a in matrices], float(len(self.actors))
        for key, a in zip(self.keys, matrices, strict=True):
            blocks = ray.put(np.stack([own_block(a, count, i) for i in range(count)]))
            ray.get([actor.place.remote(key, range(count), blocks) for actor in self.actors])

    def product(self, turn: int) -> float:
        """Seconds of a product."""
        found: dict[tuple[str, int], np.ndarray] = {}
        pending: dict[Any, tuple[Any, tuple[str, int]]] = {}
        start = time.perf_counter()
        x = ray.put(self.x)
        left = [(key, i) for i in reversed(range(self.count)) for key in reversed(self.keys)]
        free = self.actors * self.ahead
        while left or pending:
            while free and left:
                actor, item = free.pop(0), left.pop()
                pending[actor.multiply.remote(item[0], turn, [item[1]], x)] = (actor, item)
            for answer in ray.wait(list(pending))[0]:
                actor, item = pending.pop(answer)
                found[item] = ray.get(answer)[0][0]
                free.append(actor)
        taken = time.perf_counter() - start
        for key, right in zip(self.keys, self.expected, strict=True):
            y = np.concatenate([found[key, i] for i in range(self.count)])[: len(right)]
            assert np.linalg.norm(y - right) < 1e-9 * np.linalg.norm(right)
        return taken


class Ideal:
    """The work queue without messages on the plan's workers: L / sum of 1 / Z."""

    model = None

    def __init__(self, problem: Problem, made: CodedPlan) -> None:
        self.problem, self.made, self.copies = problem, made, float(len(problem.workers))

    def product(self, turn: int) -> float:
        """Seconds of a product."""
        speeds = [[1 / row_time(self.problem, m, n, turn) for n in self.made.workers_of(m)] for m in range(2)]
        return max(ROWS / sum(each) for each in speeds) / 1000


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--workers", type=int, default=12)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--rate", type=float, default=0.25, help="rows per ms of the slowest worker")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--advised", action="store_true", help="only the task queues and the advised plan")
    given = parser.parse_args()
    problem = cluster(given.workers, given.rate, given.seed)
    position = {name: n for n, name in enumerate(problem.workers)}

    def stall(worker: str, master: str, turn: int, rows: int) -> float:
        return rows * row_time(problem, "xy".index(master), position[worker], turn) / 1000

    ray.init(
        num_cpus=given.workers,
        include_dashboard=False,
        log_to_driver=False,
        logging_level=logging.ERROR,
        object_store_memory=200 * 2**20,
    )
    rng = np.random.default_rng(1)
    matrices, x = [rng.standard_normal((ROWS, COLUMNS)) for _ in range(2)], rng.standard_normal(COLUMNS)
    best = plan(problem, "exact")
    with WorkerPool(problem.workers, delay=stall) as pool:

        def run(made: CodedPlan, messages: int = 1) -> Coded:
            return Coded(made, pool, matrices, x, messages)

        contenders: dict[str, Coded | TaskQueue | Ideal] = {}
        if not given.advised:
            contenders |= {
                "uncoded, uniform": run(plan(problem, "uniform", coded=False)),
                "uncoded, by mean speed": run(plan(problem, "exact", coded=False)),
                "coded, uniform": run(plan(problem, "uniform")),
                "the paper's plan (exact)": run(best),
                "the same, 6 messages": run(best, 6),
            }
        advised = "redundancy 2, 6 messages"
        contenders[advised] = run(stretched(best, 2.0), 6)
        queues = []
        for blocks in SMALL_BLOCKS:
            for ahead in (1, 2):
                queues.append(f"queue of {blocks} blocks, {ahead} at a worker")
                contenders[queues[-1]] = TaskQueue(blocks, ahead, pool, matrices, x)
        contenders["ideal work queue (computed)"] = Ideal(problem, best)

        times: dict[str, list[float]] = {name: [] for name in contenders}
        for first in range(0, given.rounds, CHUNK):
            for name, contender in progress(contenders.items(), f"products from {first} on, plans"):
                # No work that the contender before has cancelled is left in the actors' queues.
                ray.get([actor.drop.remote("", []) for actor in pool.actors.values()])
                turns = range(first, min(first + CHUNK, given.rounds))
                times[name] += [1e3 * contender.product(turn) for turn in turns]
    ray.shutdown()

    print(f"{given.workers} workers, {given.rounds} products of two masters with {ROWS} rows each")
    heads = ("mean, ms", "+-", "98 %, ms", "worst", "copies", "model")
    print(f"{'':<32}" + "".join(f"{head:>10}" for head in heads))
    for name, contender in contenders.items():
        each = np.array(times[name])
        error = 1.96 * each.std(ddof=1) / np.sqrt(len(each))
        print(
            f"{name:<32}{each.mean():>10.0f}{error:>10.0f}{np.quantile(each, 0.98):>10.0f}{each.max():>10.0f}"
            f"{contender.copies:>10.1f}" + (f"{contender.model:>10.0f}" if contender.model else "")
        )
    quickest = min(queues, key=lambda name: np.mean(times[name]))
    ours, theirs = np.array(times[advised]), np.array(times[quickest])
    print(
        f"{advised} / {quickest}: mean {ours.mean() / theirs.mean():.2f}, 98 % "
        f"{np.quantile(ours, 0.98) / np.quantile(theirs, 0.98):.2f}, worst {ours.max() / theirs.max():.2f}; "
        f"shorter in {100 * (ours < theirs).mean():.0f} % of the products"
    )


if __name__ == "__main__":
    main()
