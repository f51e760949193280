"""Draws within.svg: what a scatter from round to round costs, planned beforehand and shared out within the round.

python docs/pictures/within.py
"""

from __future__ import annotations

import numpy as np
from common import COLOURS, figure, save

from paceline.simulate import Scenario, WorkerClass, run
from paceline.simulate.timing import Constant

PACES = (1e-3, 1e-3, 4e-3)  # seconds a sample
BATCH, ROUNDS, DRAWS, WARM_UP = 768, 80, 8, 20
SCATTERS = np.linspace(0, 0.8, 9)
POLICIES = ("factoring", "level", "equal", "auto")


def shares_of_bound(scatter: float) -> list[float]:
    """Of each policy: the seconds that the sum of all speeds would take, over those taken."""
    workers = tuple(WorkerClass(Constant(pace), noise=scatter) for pace in PACES)
    scenario = Scenario(
        workers=workers, global_batch=BATCH, rounds=ROUNDS, realizations=DRAWS, known_overhead=False
    )
    outcome = run(scenario, [*POLICIES, "optimum"])
    best = outcome.policies["optimum"].latency[WARM_UP:].sum()
    return [best / outcome.policies[name].latency[WARM_UP:].sum() for name in POLICIES]


def main() -> None:
    values = np.array([shares_of_bound(float(scatter)) for scatter in SCATTERS])
    made, axes = figure(width=4.6)
    for name, colour, column in zip(POLICIES, COLOURS, values.T, strict=False):
        axes.plot(SCATTERS, 100 * column, color=colour, linestyle="--" if name == "auto" else "-", label=name)
    axes.set(xlabel="scatter of the paces (sd of the logarithm)", ylim=(0, 100))
    axes.set(ylabel="% of the best division")
    axes.set_title("3 workers, 1, 1 and 4 ms a sample, batch 768", loc="left", fontsize=10)
    axes.legend(frameon=False, fontsize=9)
    save(made, __file__)


if __name__ == "__main__":
    main()
