"""Draws coded.svg: when a product is done, by how its rows were divided. A Monte Carlo of 20,000 products.

python docs/pictures/coded.py
"""

from __future__ import annotations

import numpy as np
from common import COLOURS, figure, save

from paceline.coded import plan, random_problem, simulate, work_queue

RUNS = 20_000


def main() -> None:
    problem = random_problem(2, 12, 10_000, np.random.default_rng(3))
    coded, uncoded = plan(problem, "exact"), plan(problem, "exact", coded=False)
    equal = plan(problem, "uniform", coded=False)

    def rng() -> np.random.Generator:
        return np.random.default_rng(0)

    ways = (
        ("equal parts, no code", simulate(equal, RUNS, rng())),
        ("by mean speed, no code", simulate(uncoded, RUNS, rng())),
        ("the paper's plan", simulate(coded, RUNS, rng())),
        ("the plan in 6 messages", simulate(coded, RUNS, rng(), messages=6)),
        ("an ideal work queue", work_queue(coded, RUNS, rng())),
    )
    made, axes = figure(width=7)
    for (name, done), colour in zip(ways, COLOURS, strict=False):
        t, part = done.cdf()
        axes.plot(
            t / 1e3, 100 * part, color=colour, label=f"{name}: {done.mean().value / 1e3:.2f} s on average"
        )
    axes.set(xlabel="seconds", ylabel="% of the products done", ylim=(0, 100))
    axes.set_xlim(0, np.quantile(ways[0][1].system, 0.98) / 1e3)
    axes.set_title("2 masters, 12 workers drawn at random, virtual clock", loc="left", fontsize=10)
    axes.legend(frameon=False, fontsize=8)
    save(made, __file__)


if __name__ == "__main__":
    main()
