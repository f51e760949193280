"""What do coded plans expect: with loads of at most L, in messages, by a deadline, when masters come and go?

All by simulation, with u uniform on [1, 5] per ms, a = 1 / u and L = 1e5 unless a line says otherwise; a minute.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
from scaffold import command_line, progress

from paceline.coded import (
    CodedPlan,
    Problem,
    ShiftedExponential,
    by_deadline,
    plan,
    random_problem,
    rearrange,
    simulate,
    stretched,
    work_queue,
)
from paceline.coded.coded_plan import finish

RUNS = 20_000


def mean(made: CodedPlan, messages: int = 1) -> float:
    """Mean milliseconds of the slowest master."""
    return simulate(made, RUNS, np.random.default_rng(0), messages).mean().value


def limited() -> None:
    drawn = np.random.default_rng(1).uniform(1, 5, (1, 5))
    for workers, rows, u, uncoded in (
        ("three equal workers", 1000, np.ones((1, 3)), "uniform"),
        ("five workers, u uniform on [1, 5], by mean speed if uncoded", 10_000, drawn, "iterated"),
    ):
        print(f"one master, {workers}, L = {rows:,}, mean ms and copies of the matrix")
        print(
            f"{'u a':>8}{'printed':>10}{'copies':>8}{'largest / L':>13}{'limited':>10}{'copies':>8}{'uncoded':>10}"
        )
        names = tuple(f"w{n}" for n in range(u.shape[1]))
        for ua in (0.01, 0.001):
            problem = Problem(("x",), names, np.array([float(rows)]), ShiftedExponential(u, ua / u))
            printed, made = plan(problem, rule="printed"), plan(problem)
            print(
                f"{ua:>8g}{mean(printed):>10.0f}{printed.copies[0]:>8.1f}{printed.loads.max() / rows:>13.1f}"
                f"{mean(made):>10.0f}{made.copies[0]:>8.1f}{mean(plan(problem, uncoded, coded=False)):>10.0f}"
            )


def chosen() -> None:
    print(
        "\nL = 1,000, u uniform on [1, 5], u a = 0.01, 20 clusters: k for limited loads and for Theorem 1's"
    )
    print(f"{'cluster':>9}  {'assignment':<15}{'t*':>8}{'least':>8}{'mean ms':>10}")
    for masters, workers in ((2, 4), (2, 6), (3, 9)):
        names = tuple(f"m{m}" for m in range(masters)), tuple(f"w{n}" for n in range(workers))
        for assign in ("exact", "probabilistic"):
            found = []
            for seed in progress(range(20), f"{masters} x {workers} {assign}, clusters"):
                u = np.random.default_rng(seed).uniform(1, 5, (masters, workers))
                problem = Problem(*names, np.full(masters, 1000.0), ShiftedExponential(u, 0.01 / u))
                phi, rate = problem.delay.peak()
                k = plan(problem, assign, rule="printed").probability
                before, now = finish(problem, assign, k, True, phi, rate), plan(problem, assign)
                found.append([now.t_star.max() / before.t_star.max(), mean(now) / mean(before)])
            (t, took), least = np.mean(found, axis=0), np.min(found, axis=0)[0]
            print(f"{masters:>3} x {workers:>3}  {assign:<15}{t:>8.3f}{least:>8.3f}{took:>10.3f}")


def in_messages(problem: Problem) -> None:
    print("\n4 masters, 50 workers, one cluster: mean system time, s")
    made = plan(problem)
    lines: dict[str, Callable[[], float]] = {
        "uncoded, equal parts": lambda: mean(plan(problem, "uniform", coded=False)),
        "uncoded, by mean speed": lambda: mean(plan(problem, coded=False)),
        "this plan": lambda: mean(made),
        "in 8 messages": lambda: mean(made, 8),
        "with redundancy 2, in 8 messages": lambda: mean(stretched(made, 2.0), 8),
        "ideal work queue": lambda: work_queue(made, RUNS, np.random.default_rng(0)).mean().value,
    }
    for name, value in lines.items():
        print(f"  {name:<34}{value() / 1000:>6.2f}")


def finishing() -> None:
    runs, never = 0, 0.0
    for seed in progress(range(10), "clusters"):
        made = plan(random_problem(4, 50, 1e5, np.random.default_rng(seed)), "probabilistic")
        done = simulate(made, 10_000, np.random.default_rng(0))
        runs, never = runs + 10_000, never + done.never() * 10_000
    print(f"\nprobabilistic plans, 10 clusters of 4 x 50: {never:.0f} of {runs} runs never finish")


def changing() -> None:
    print("\n4 x 50 and a fifth master: workers that move")
    five = random_problem(5, 50, 1e5, np.random.default_rng(0))
    four = Problem(five.masters[:4], five.workers, five.rows[:4], five.delay.take(slice(0, 4)))
    before = plan(four, "exact")
    for within in (0.0, 0.05):
        came = rearrange(before, five, within)
        went = rearrange(came.plan, four, within)
        print(f"  within {100 * within:g} %: {len(came.moved)} when it comes, {len(went.moved)} when it goes")


def in_time(problem: Problem, t: float = 8000.0) -> None:
    print(f"\n4 x 50, all done by {t / 1000:g} s")
    made = plan(problem, "exact")
    start = time.perf_counter()
    found, chances = by_deadline(made, t)
    took = time.perf_counter() - start
    before, after = (
        simulate(each, RUNS, np.random.default_rng(1)).probability(t).value for each in (made, found)
    )
    print(
        f"  probability {np.prod(chances):.3f} ({after:.3f} by simulation), "
        f"{before:.3f} with Theorem 1's loads; {took:.1f} s"
    )


def main() -> None:
    command_line(__doc__).parse_args()
    problem = random_problem(4, 50, 1e5, np.random.default_rng(0))
    limited()
    chosen()
    in_messages(problem)
    finishing()
    changing()
    in_time(problem)


if __name__ == "__main__":
    main()
