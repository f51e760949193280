"""Draws tutorial.svg from the two runs of docs/tutorial.md.

python docs/pictures/tutorial.py RUNS (the folder with equal and level)
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
from common import BLUE, ORANGE, figure, save

from paceline.runs import read


def main() -> None:
    made, (loads, seconds) = figure(rows=2, height=4.4, width=4.6, sharex=True)
    for policy, colour in (("equal", ORANGE), ("level", BLUE)):
        run = read(Path(sys.argv[1]) / policy)
        rounds = np.arange(1, len(run.seconds) + 1)
        for worker, line in enumerate(("-", "--")):
            samples = run.loads[:, worker]
            loads.step(
                rounds, samples, where="mid", color=colour, linestyle=line, label=f"{policy}, worker {worker}"
            )
        seconds.step(rounds, run.seconds, where="mid", color=colour, label=policy)
    loads.set(ylabel="samples", ylim=(0, None))
    loads.legend(frameon=False, fontsize=8, loc="lower center", bbox_to_anchor=(0.5, 1), ncols=2)
    seconds.set(xlabel="round (the last of each epoch is short)", ylabel="seconds", ylim=(0, None))
    seconds.legend(frameon=False, fontsize=8, loc="upper right")
    save(made, __file__)


if __name__ == "__main__":
    main()
