"""What do coded plans expect: with loads of at most L, in messages, by a deadline, when masters come and go?

All by simulation, with u uniform on [1, 5] per ms, a = 1 / u and L = 1e5 unless a line says otherwise; a minute.
"""

from __future__ import annotations

import time

import numpy as np
from scaffold import command_line

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

RUNS = 20_000


def mean(made: CodedPlan, messages: int = 1) -> float:
    """Mean milliseconds of the slowest master."""
    return simulate(made, RUNS, np.random.default_rng(0), messages).mean().value


def limited() -> None:
    print("three equal workers, L = 1,000, ms and copies of the matrix")
    print(
        f"{'u a':>8}{'printed':>10}{'copies':>8}{'largest / L':>13}{'limited':>10}{'copies':>8}{'uncoded':>10}"
    )
    for ua in (0.01, 0.001):
        u = np.ones((1, 3))
        problem = Problem(("x",), ("v", "w", "z"), np.array([1000.0]), ShiftedExponential(u, ua / u))
        printed, made = plan(problem, "uniform", rule="printed"), plan(problem, "uniform")
        uncoded = plan(problem, "uniform", coded=False)
        print(
            f"{ua:>8g}{mean(printed):>10.0f}{printed.copies[0]:>8.1f}{printed.loads.max() / 1000:>13.1f}"
            f"{mean(made):>10.0f}{made.copies[0]:>8.1f}{mean(uncoded):>10.0f}"
        )


def in_messages(problem: Problem) -> None:
    print("\n4 masters, 50 workers, one cluster: mean system time, s")
    made = plan(problem)
    lines = {
        "uncoded, equal parts": mean(plan(problem, "uniform", coded=False)),
        "uncoded, by mean speed": mean(plan(problem, coded=False)),
        "this plan": mean(made),
        "in 8 messages": mean(made, 8),
        "with redundancy 2, in 8 messages": mean(stretched(made, 2.0), 8),
        "ideal work queue": work_queue(made, RUNS, np.random.default_rng(0)).mean().value,
    }
    for name, value in lines.items():
        print(f"  {name:<34}{value / 1000:>6.2f}")


def finishing() -> None:
    runs, never = 0, 0.0
    for seed in range(10):
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
    made = plan(problem, "exact")
    start = time.perf_counter()
    found, chances = by_deadline(made, t)
    took = time.perf_counter() - start
    before, after = (
        simulate(each, RUNS, np.random.default_rng(1)).probability(t).value for each in (made, found)
    )
    print(
        f"\n4 x 50, all done by {t / 1000:g} s: probability {np.prod(chances):.3f} ({after:.3f} by simulation), "
        f"{before:.3f} with Theorem 1's loads; {took:.1f} s"
    )


def main() -> None:
    command_line(__doc__).parse_args()
    problem = random_problem(4, 50, 1e5, np.random.default_rng(0))
    limited()
    in_messages(problem)
    finishing()
    changing()
    in_time(problem)


if __name__ == "__main__":
    main()
