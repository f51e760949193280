"""Draws simulate.svg: seconds of each round of examples/scenarios/mixed.toml under four policies.

python docs/pictures/simulate.py
"""

from __future__ import annotations

import numpy as np
from common import COLOURS, FOLDER, figure, plain, save

from paceline.simulate import read, run
from paceline.simulate.measures import band

POLICIES = ("equal", "dolbie", "level", "optimum")


def main() -> None:
    outcome = run(read(FOLDER.parents[1] / "examples" / "scenarios" / "mixed.toml"), list(POLICIES))
    made, axes = figure(width=7)
    rounds = np.arange(1, outcome.scenario.rounds + 1)
    for name, colour in zip(POLICIES, COLOURS, strict=False):
        mean, half = band(outcome.policies[name].latency)
        axes.plot(rounds, mean, color=colour, label=name)
        axes.fill_between(rounds, mean - half, mean + half, color=colour, alpha=0.25, linewidth=0)
    axes.set(xlabel="round", ylabel="seconds of the round", yscale="log")
    plain(axes, 0.03, 0.05, 0.1, 0.2)
    axes.set_title("30 workers of five kinds, 100 realizations, 95 % bands", loc="left", fontsize=10)
    axes.legend(frameon=False, fontsize=8, loc=(0.72, 0.55))
    save(made, __file__)


if __name__ == "__main__":
    main()
