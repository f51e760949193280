"""How long does one decision take, against a plain copy of what it reads?

For each policy and number of workers: seconds for one step, and their ratio to copying all arrays of the round
and of the policy's state once (the least that any decision has to touch), both measured in turn within one run.
The last line is the step after the decision: the plan of `level` in whole samples, against the same copy.
Speeds scatter by 5 % around classes 1 : 4 and overheads differ, so that every round is a new problem.

    python benchmarks/decisions.py [--workers 30,1000,...] [--policies level,dolbie,...]
"""

from __future__ import annotations

import time
from statistics import median
from typing import Any

import numpy as np
from scaffold import command_line

from paceline import Cluster, Machines, Round, policies
from paceline.costs import Linear
from paceline.shares import whole_samples

SIZES = (30, 300, 3_000, 30_000, 300_000, 1_000_000)


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--workers", default=",".join(map(str, SIZES)))
    parser.add_argument("--policies", default=",".join(policies.names()))
    given = parser.parse_args()
    print("One decision: milliseconds, and in parentheses how many times a copy of its inputs takes.\n")
    sizes = [int(n) for n in given.workers.split(",")]
    print(f"{'policy':12s}" + "".join(f"{n:>20,d}" for n in sizes))
    for name in given.policies.split(","):
        cells = [measure(name, n) for n in sizes]
        show(name, [(step, copied) for step, copied, _ in cells])
        if name == "level":
            rounding = [(whole, copied) for _, copied, whole in cells]
    if "level" in given.policies.split(","):
        show("(rounding)", rounding)


def show(name: str, cells: list[tuple[float, float]]) -> None:
    columns = [f"{1e3 * taken:11.3f} {f'({taken / copied:.1f})':>8s}" for taken, copied in cells]
    print(f"{name:12s}" + "".join(columns), flush=True)


def measure(name: str, workers: int) -> tuple[float, float, float]:
    """Median seconds of a step, of a copy of everything it reads, and of rounding, over the rounds after a start."""
    rng = np.random.default_rng(0)
    machines = Machines(*(rng.integers(1, 9, workers).astype(float) for _ in range(3)))
    policy = policies.create(name, Cluster(workers, 64 * workers, machines=machines))
    base = rng.choice([1e-3, 4e-3], workers)
    plan, state = policy.init()
    steps: list[float] = []
    copies: list[float] = []
    roundings: list[float] = []
    start, rounds = time.perf_counter(), 0
    while rounds < 8 or (time.perf_counter() - start < 0.3 and rounds < 300):
        costs = Linear(base * np.exp(0.05 * rng.standard_normal(workers)), rng.uniform(0, 0.02, workers))
        seconds = costs.seconds(plan.shares * 64 * workers)
        seen = Round(plan.shares, seconds, 64 * workers, costs.overhead, upcoming=costs)
        read = inputs(seen, state, policy.needs_upcoming)
        if not rounds:
            targets = [np.empty_like(array) for array in read]
        copies.append(copy(read, targets))
        begun = time.perf_counter()
        plan, state = policy.step(state, seen)
        steps.append(time.perf_counter() - begun)
        rounds += 1
        if rounds > 3 and len(roundings) < 5 and name == "level":
            begun = time.perf_counter()
            whole_samples(plan, 64 * workers)
            roundings.append(time.perf_counter() - begun)
    return median(steps[3:]), median(copies[3:]), median(roundings or [0.0])


def inputs(seen: Round, state: Any, upcoming: bool) -> list[np.ndarray]:
    arrays = [seen.shares, seen.seconds, seen.overhead, seen.present, *policies.leaves(state)]
    if upcoming:
        assert isinstance(seen.upcoming, Linear)
        arrays += [seen.upcoming.seconds_per_sample, seen.upcoming.overhead]
    return arrays


def copy(read: list[np.ndarray], targets: list[np.ndarray]) -> float:
    """Seconds to copy all arrays into memory that is already there: the strictest measure of a copy."""
    begun = time.perf_counter()
    for target, array in zip(targets, read, strict=True):
        np.copyto(target, array)
    return time.perf_counter() - begun


if __name__ == "__main__":
    main()
