"""Who finishes coded products first on real Ray workers with sleeping stalls?

Two masters share 12 workers (``--workers``); worker n sleeps rows x (a + E / u) ms for master m, E drawn
for each product, the same for every contender. Mean and 98 % of the time until both masters have their
product, against the work queue's ideal on the same draws (perfect balance, no messages) and Ray's own
ActorPool over small blocks.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import numpy as np
import ray
from ray.util import ActorPool
from scaffold import command_line

from paceline.coded import CodedPlan, Problem, ShiftedExponential, plan, simulate
from paceline.coded.codes import own_block
from paceline.ray import CodedMatrix, WorkerPool

ROWS, COLUMNS = 1200, 64
SMALL_BLOCKS = (30, 60, 120)  # of each master, for the task queue


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


def coded(
    made: CodedPlan, pool: WorkerPool, matrices: list[np.ndarray], x: np.ndarray, rounds: int, **options: Any
) -> list[float]:
    """Seconds of each round; both masters at once."""
    both = [CodedMatrix(a, made, m, pool, **options) for m, a in enumerate(matrices)]
    expected = [a @ x for a in matrices]
    times = []
    with ThreadPoolExecutor(2) as threads:
        for _ in range(rounds):
            start = time.perf_counter()
            products = list(threads.map(lambda each: each @ x, both))
            times.append(time.perf_counter() - start)
            for y, right in zip(products, expected, strict=True):
                assert np.linalg.norm(y - right) < 1e-9 * np.linalg.norm(right)
    for each in both:
        each.close()
    return times


def task_queue(
    pool: WorkerPool, matrices: list[np.ndarray], x: np.ndarray, rounds: int, count: int
) -> list[float]:
    """ray.util.ActorPool: the next small block goes to the next free worker; every worker holds every
    block.
    """
    keys = [f"{name}/queue of {count}" for name in "xy"]
    for key, a in zip(keys, matrices, strict=True):
        blocks = ray.put(np.stack([own_block(a, count, i) for i in range(count)]))
        ray.get([actor.place.remote(key, range(count), blocks) for actor in pool.actors.values()])
    actors = ActorPool(list(pool.actors.values()))
    items = [(key, i) for i in range(count) for key in keys]
    times = []
    for turn in range(rounds):
        start = time.perf_counter()
        x_ref = ray.put(x)
        work = [(*item, turn, x_ref) for item in items]
        for _ in actors.map_unordered(lambda actor, w: actor.multiply.remote(w[0], w[2], [w[1]], w[3]), work):
            pass
        times.append(time.perf_counter() - start)
    return times


def ideal(problem: Problem, made: CodedPlan, rounds: int) -> list[float]:
    """The work queue without messages on the plan's workers: L / sum of 1 / Z."""
    return [
        max(ROWS / sum(1 / row_time(problem, m, n, turn) for n in made.workers_of(m)) for m in range(2))
        / 1000
        for turn in range(rounds)
    ]


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--workers", type=int, default=12)
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--rate", type=float, default=0.25, help="rows per ms of the slowest worker")
    parser.add_argument("--seed", type=int, default=0)
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
    uniform = plan(problem, "uniform")
    uncoded = plan(problem, "uniform", coded=False)
    by_speed = plan(problem, "exact", coded=False)
    with WorkerPool(problem.workers, delay=stall) as pool:

        def run(made: CodedPlan, **options: Any) -> Callable[[], list[float]]:
            return lambda: coded(made, pool, matrices, x, given.rounds, **options)

        def model(made: CodedPlan, messages: int = 1) -> float:
            return simulate(made, 20_000, np.random.default_rng(0), messages).mean().value

        contenders: dict[str, tuple[Callable[[], list[float]], float | None]] = {
            "uncoded, uniform": (run(uncoded), model(uncoded)),
            "uncoded, planned by mean speed": (run(by_speed), model(by_speed)),
            "coded, uniform": (run(uniform), model(uniform)),
            "coded, this plan (exact)": (run(best), model(best)),
            "this plan, 6 messages a worker": (run(best, messages=6), model(best, 6)),
        }
        for blocks in SMALL_BLOCKS:
            queue = partial(task_queue, pool, matrices, x, given.rounds, blocks)
            contenders[f"Ray ActorPool, {blocks} small blocks each"] = (queue, None)
        contenders["ideal work queue (computed)"] = (lambda: ideal(problem, best, given.rounds), None)

        first = None
        print(f"{given.workers} workers, {given.rounds} products of two masters with {ROWS} rows each")
        print(f"{'':<38} {'mean':>8} {'+-':>6} {'98 %':>8} {'of uncoded':>11} {'model':>8}")
        for name, (contender, expected) in contenders.items():
            times = 1e3 * np.array(contender())
            first = first or float(times.mean())
            error = 1.96 * times.std(ddof=1) / np.sqrt(len(times))
            print(
                f"{name:<38} {times.mean():>5.0f} ms {error:>6.0f} {np.quantile(times, 0.98):>5.0f} ms "
                f"{100 * times.mean() / first:>9.0f} %" + (f" {expected:>5.0f} ms" if expected else ""),
                flush=True,
            )
    ray.shutdown()


if __name__ == "__main__":
    main()
