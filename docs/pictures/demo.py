"""Draws demo.png, the first picture of the README, from the runs that ``make demo`` leaves.

python docs/pictures/demo.py runs/digits-mlp-compare/equal runs/digits-mlp-compare/level
"""

from __future__ import annotations

import sys

import matplotlib.pyplot as plt
import numpy as np
from common import BLUE, ORANGE, save, waiting

from paceline.runs import Run, read

ROUNDS = 6


def timeline(axes: plt.Axes, run: Run, first: int, title: str) -> float:
    """Compute and wait of each worker over a few rounds; the seconds that they took."""
    start = 0.0
    for t in range(first, first + ROUNDS):
        length = run.seconds[t]
        waiting(axes, range(run.workers), [length] * run.workers, start)
        axes.barh(range(run.workers), run.compute[t], left=start, color=BLUE, height=0.7)
        start += length
        axes.axvline(start, color="white", linewidth=1.5)
    axes.set_title(title, loc="left", fontsize=10)
    axes.set_yticks(range(run.workers), [f"worker {i}" for i in range(run.workers)], fontsize=8)
    axes.invert_yaxis()
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(axis="y", length=0)
    return start


def main(equal_dir: str, level_dir: str) -> None:
    equal, level = read(equal_dir), read(level_dir)
    figure = plt.figure(figsize=(10, 3.6), layout="constrained")
    grid = figure.add_gridspec(2, 5)
    above, below = figure.add_subplot(grid[0, :3]), figure.add_subplot(grid[1, :3])
    curve = figure.add_subplot(grid[:, 3:])
    middle = len(equal.round) // 2
    span = timeline(above, equal, middle, f"{ROUNDS} rounds of plain DDP: everybody waits for worker 3")
    timeline(below, level, middle, f"the same {ROUNDS} rounds under Paceline")
    for axes in (above, below):
        axes.set_xlim(0, span)
    below.set_xlabel("seconds (blue: computing, hatched: waiting)", fontsize=8)
    for run, name, colour in ((equal, "plain DDP", ORANGE), (level, "Paceline", BLUE)):
        ended = np.cumsum(run.seconds)
        curve.plot(ended, run.loss, color=colour, label=f"{name}: {ended[-1]:.0f} s")
    curve.legend(frameon=False, fontsize=9)
    curve.set_title("the same model, sooner", loc="left", fontsize=10)
    curve.set_xlabel("seconds", fontsize=8)
    curve.set_ylabel("training loss", fontsize=8)
    curve.spines[["top", "right"]].set_visible(False)
    save(figure, __file__, ".png")


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    main(*sys.argv[1:])
