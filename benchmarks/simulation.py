"""How fast is the virtual cluster, and how close does each policy come to the oracle on it?

    python benchmarks/simulation.py [--quick]

1. Seconds of processor time for 100 realizations x 30 workers x 100 rounds, every policy; beside it the same, one
   realization after another (timed on a few and scaled up).
2. Worker-rounds a second and peak memory for `dolbie`, larger and larger.
3. Total seconds over the oracle's (1 is the limit) on profiles A and B: 30 workers, each of five classes at random,
   paces and overheads drifting (autoregression, correlation 0.9, standard deviation of the logarithm 5 % and 10 %).
   A: 3000, 1700, 1000, 90, 45 samples/s, overhead 20 ms; B: 3000, 1700, 1000, 40, 12 samples/s, 35 to 50 ms.
   "from 3" leaves out the first, blind round and the one after it; "noise" adds 30 % to each round's paces.
4. What no policy can go below on profile A, however good its forecast: the stochastic programme on what is known a
   round ahead (drift known exactly), solved on sampled futures.
"""

from __future__ import annotations

import dataclasses
import time
import tracemalloc
from collections.abc import Sequence
from typing import Any

import numpy as np
from scaffold import command_line, counter, progress
from scipy import sparse
from scipy.optimize import linprog

from paceline import policies, simulate
from paceline.balancer import Balancer
from paceline.costs import Linear
from paceline.rounds import Array, Cluster
from paceline.shares import water_level
from paceline.simulate import Scenario, WorkerClass
from paceline.simulate.measures import estimate, oracle_ratio, seconds_at
from paceline.simulate.timing import Ar1

A = ((3000, 1700, 1000, 90, 45), (0.02,) * 5)
B = ((3000, 1700, 1000, 40, 12), (0.035, 0.03875, 0.0425, 0.04625, 0.05))
RHO, PACE_SD, OVERHEAD_SD = 0.9, 0.05, 0.1
FORECASTS = ("tracking", "last", "ema", "arima")


def profile(
    speeds: Sequence[float], overheads: Sequence[float], realizations: int, noise: float = 0.0, **fields: Any
) -> Scenario:
    classes = tuple(
        WorkerClass(Ar1(1 / speed, RHO, PACE_SD), Ar1(overhead, RHO, OVERHEAD_SD), noise=noise)
        for speed, overhead in zip(speeds, overheads, strict=True)
    )
    options: dict[str, Any] = {"fractional": True} | fields
    return Scenario(classes, draw=30, realizations=realizations, **options)


def speed(realizations: int) -> None:
    print("1. processor seconds, every policy at once")
    names = policies.names()
    few = 5
    for fractional in (True, False):
        what = profile(*A, realizations, fractional=fractional)
        simulate.run(dataclasses.replace(what, rounds=2), names)
        began = time.process_time()
        simulate.run(what, names, counter("rounds at once"))
        together = time.process_time() - began
        began = time.process_time()
        for seed in progress(range(few), "realizations one by one"):
            simulate.run(dataclasses.replace(what, realizations=1, seed=seed), names)
        single = (time.process_time() - began) * realizations / few
        kind = "fractions" if fractional else "whole samples"
        print(
            f"   {realizations} x 30 x 100, {len(names)} policies, {kind:13}: {together:.2f} s; "
            f"one by one {single:.1f} s, {single / together:.0f}x"
        )


def size() -> None:
    print("2. dolbie alone, 30 rounds of fractions")
    for realizations, workers in ((100, 30), (100, 300), (100, 3000)):
        classes = (WorkerClass(Ar1(0.001), Ar1(0.02), count=workers),)
        what = Scenario(
            classes, rounds=30, realizations=realizations, fractional=True, global_batch=8 * workers
        )
        began = time.process_time()
        simulate.run(what, ["dolbie"])
        took = time.process_time() - began
        tracemalloc.start()
        simulate.run(dataclasses.replace(what, rounds=3), ["dolbie"])
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        count = realizations * workers
        print(
            f"   {realizations} x {workers}: {30 * count / took / 1e6:.1f} million worker-rounds/s, peak "
            f"{peak / 2**20:.1f} MiB, {peak / 8 / count:.0f} numbers a worker"
        )


def ratios(realizations: int) -> None:
    names = [*(name for name in policies.names() if name != "level")]
    names += ["abs:reading=share", "lbbsp:reading=strict", "dolbie:monotone=false", "dolbie:tight=true"]
    names += [f"level:forecast={name}" for name in FORECASTS]
    cases = {
        "A": profile(*A, realizations),
        "A whole": profile(*A, realizations, fractional=False),
        "A noise": profile(*A, realizations, noise=0.3),
        "A late": profile(*A, realizations, decision_delay=3),
        "B": profile(*B, realizations),
        "B noise": profile(*B, realizations, noise=0.3),
    }
    outcomes = {
        label: simulate.run(what, names, counter(f"{label}, rounds")) for label, what in cases.items()
    }
    print(f"3. total over the oracle's, {realizations} realizations, 100 rounds: all rounds / from 3")
    print(f"   {'':24}" + "".join(f"{label:>15}" for label in cases) + f"{'A: s @40':>11}{'@100':>8}")
    for name in names:
        row = ""
        for outcome in outcomes.values():
            played = outcome.policies[name]
            whole, later = (oracle_ratio(played, outcome, start).mean() for start in (1, 3))
            row += f"{whole:>8.3f}/{later:.3f}" + " " * (1 if later < 10 else 0)
        at = seconds_at(outcomes["A"].policies[name])
        print(f"   {name:24}{row}{at[40].mean:>10.3f}{at[100].mean:>8.3f}")
    totals = "".join(f"{estimate(outcome.oracle.sum(0)).mean:>14.2f}s" for outcome in outcomes.values())
    print(f"   {'the oracle, in seconds':24}{totals}")


def floor(clusters: int, samples: int = 400) -> None:
    print("4. profile A, one round ahead with the drift known exactly, over the oracle's")
    rng = np.random.default_rng(0)
    step = np.sqrt(1 - RHO**2)
    found = []
    for _ in progress(range(clusters), "clusters"):
        pace = 1 / np.array(A[0], float)[rng.integers(0, 5, 30)]
        pace *= np.exp(RHO * PACE_SD * rng.standard_normal(30))
        overhead = 0.02 * np.exp(RHO * OVERHEAD_SD * rng.standard_normal(30))

        def futures(count: int, pace: Array = pace, overhead: Array = overhead) -> tuple[Array, Array]:
            paces = pace * np.exp(PACE_SD * step * rng.standard_normal((count, 30)))
            return paces, overhead * np.exp(OVERHEAD_SD * step * rng.standard_normal((count, 30)))

        paces, overheads = futures(samples)
        row = np.arange(samples * 30)
        loads = sparse.coo_matrix((paces.ravel(), (row, np.tile(np.arange(30), samples))))
        ends = sparse.coo_matrix((-np.ones(samples * 30), (row, np.repeat(np.arange(samples), 30))))
        best = linprog(
            np.r_[np.zeros(30), np.ones(samples) / samples],
            A_ub=sparse.hstack([loads, ends]).tocsr(),
            b_ub=-overheads.ravel(),
            A_eq=sparse.csr_matrix(np.r_[np.ones(30), np.zeros(samples)][None]),
            b_eq=[256],
            method="highs-ipm",
        )
        paces, overheads = futures(4000)
        ideal = (overheads + paces * water_level(Linear(paces, overheads), 256).loads).max(-1).mean()
        same = water_level(Linear(pace, overhead), 256).loads
        found.append(
            [(overheads + paces * division).max(-1).mean() / ideal for division in (same, best.x[:30])]
        )
    same, best = np.mean(found, axis=0)
    print(f"   everybody aims at the same time {same:.3f}; the stochastic programme {best:.3f}")
    print(f"   with a blind first round of 8.0 times the oracle's, 100 rounds: {(8.0 + 99 * best) / 100:.3f}")


def short_steps(runs: int) -> None:
    print(
        "5. equal workers in short steps: rounds over those with equal shares, largest load over the equal one"
    )
    overhead, slope, samples, rounds, warm = 2e-3, 13e-6, 16, 400, 2
    for workers in (2, 4, 8):
        for scatter, spikes in ((0.05, 0.0), (0.2, 0.1)):
            largest = []
            for seed in progress(range(runs), f"{workers} workers, runs"):
                rng = np.random.default_rng(seed)
                batch = samples * workers
                balancer = Balancer(policies.create("level", Cluster(workers, batch)))
                for step in range(rounds):
                    loads = balancer.loads(step, batch)
                    noise = np.exp(scatter * rng.standard_normal(workers)) * (3 if step < warm else 1)
                    noise *= np.where(rng.random(workers) < spikes, rng.uniform(1.5, 4, workers), 1.0)
                    balancer.report(step, loads, (overhead + slope * loads) * noise)
                    if step >= rounds // 2:
                        largest.append(loads.max())
            times, equal = overhead + slope * np.array(largest), overhead + slope * samples
            print(
                f"   {workers} workers, scatter {scatter}, spikes in {spikes:.0%} of the rounds: "
                f"{times.mean() / equal:.2f}, {np.mean(largest) / samples:.1f}"
            )


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--quick", action="store_true", help="10 realizations")
    options = parser.parse_args()
    realizations = 10 if options.quick else 100
    speed(realizations)
    size()
    ratios(realizations)
    floor(3 if options.quick else 20)
    short_steps(2 if options.quick else 8)


if __name__ == "__main__":
    main()
