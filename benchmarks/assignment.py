"""How fast is a coded plan made, and how good is it?

Median CPU times against the limits the project sets itself, t* against the linear programme's (the lower bound),
the paper's successive convex approximation (cvxpy) beside the linear programme, and Monte Carlo of completion
times.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial
from itertools import islice
from typing import TypeVar

import numpy as np
from scaffold import command_line, progress

from paceline.coded import Problem, plan, random_problem, simulate
from paceline.coded.assign import exact, iterated, probabilistic, simple
from paceline.coded.delay import ShiftedExponential
from paceline.papers.coded import Iterate, successive

Found = TypeVar("Found")

LIMITS: dict[tuple[int, int], dict[str, float | None]] = {  # seconds, by size and method
    (4, 50): {"simple": None, "iterated": 0.1, "exact": 2.0, "probabilistic": 0.05},
    (20, 2000): {"simple": 1.0, "iterated": 10.0, "probabilistic": 5.0},
}
METHODS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "simple": simple,
    "iterated": iterated,
    "exact": exact,
    "probabilistic": probabilistic,
}


def timed(run: Callable[[], Found]) -> tuple[float, Found]:
    start = time.process_time()
    result = run()
    return time.process_time() - start, result


def converged(problem: Problem, iterations: int = 300) -> Iterate:
    """The last iterate of the successive convex approximation, or the last of ``iterations``."""
    assert isinstance(problem.delay, ShiftedExponential)
    *_, last = islice(successive(problem.delay, problem.rows), iterations + 1)
    return last


def main() -> None:
    command_line(__doc__).parse_args()
    print(
        f"{'size':>9} {'method':<14} {'median':>10} {'slowest':>10} {'limit':>8}  t* / linear programme "
        f"(mean)"
    )
    probabilistic(random_problem(2, 4, 1e5, np.random.default_rng(0)).delay.peak()[1])  # load the solver
    for (masters, workers), limits in LIMITS.items():
        draws = 12 if workers < 1000 else 3
        values = [
            random_problem(masters, workers, 1e5, np.random.default_rng(s)).delay.peak()[1] / 1e5
            for s in range(draws)
        ]
        level = {
            name: [
                timed(partial(METHODS[name], v)) for v in progress(values, f"{masters} x {workers} {name}")
            ]
            for name in limits
        }
        bounds = [(k * v).sum(1).min() for (_, k), v in zip(level["probabilistic"], values, strict=True)]
        for name, limit in limits.items():
            taken = [s for s, _ in level[name]]
            ratio = np.mean(
                [b / (k * v).sum(1).min() for (_, k), v, b in zip(level[name], values, bounds, strict=True)]
            )
            wanted = "-" if limit is None else f"{limit:g} s"
            print(
                f"{masters:>4} x {workers:<4} {name:<14} {1e3 * statistics.median(taken):>7.1f} ms "
                f"{1e3 * max(taken):>7.1f} ms {wanted:>8}  {ratio:.5f}"
            )
        if workers < 1000:
            problem = random_problem(masters, workers, 1e5, np.random.default_rng(0))
            seconds, found = timed(partial(converged, problem))
            ratio = found.t * bounds[0]
            print(
                f"{masters:>4} x {workers:<4} {'sca (cvxpy)':<14} {1e3 * seconds:>7.1f} ms {'':>10} {'':>8} "
                f" {ratio:.5f}"
            )

    print("\nMonte Carlo, 100,000 runs of 4 x 50 (limit 2 s)")
    problem = random_problem(4, 50, 1e5, np.random.default_rng(0))
    for name in ("uniform", "iterated", "probabilistic"):
        made = plan(problem, name)
        repeats = [timed(partial(simulate, made, 100_000, np.random.default_rng(0)))[0] for _ in range(5)]
        print(f"  {name:<14} {1e3 * statistics.median(repeats):>7.1f} ms")


if __name__ == "__main__":
    main()
