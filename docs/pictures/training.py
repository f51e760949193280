"""Draws training.png: real processes, the slow worker is another one from round 40 on.

python docs/pictures/training.py
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
from common import COLOURS, GREY, figure, save

from paceline import cli
from paceline.data import traces
from paceline.runs import read

STEPS, CHANGE, BATCH = 72, 40, 250  # six rounds to an epoch of the digits
FAST, SLOW = 8e-3, 32e-3  # seconds a sample


def main() -> None:
    pace = np.full((STEPS, 4), FAST)
    pace[:CHANGE, 3] = pace[CHANGE:, 1] = SLOW
    with tempfile.TemporaryDirectory() as folder:
        trace, out = Path(folder) / "speeds.csv", Path(folder) / "run"
        traces.write(trace, traces.Trace(pace, np.zeros_like(pace)))
        words = [
            "--policy",
            "level",
            "--slowdown-trace",
            str(trace),
            "--global-batch",
            str(BATCH),
            "--steps",
            str(STEPS),
            "--out",
            str(out),
        ]
        assert cli.run(["train", *words]) == 0
        run = read(out)
    made, (loads, seconds) = figure(2)
    rounds = np.arange(1, len(run.seconds) + 1)
    for i in range(run.workers):
        loads.step(rounds, run.loads[:, i], where="mid", color=COLOURS[i], label=f"worker {i}")
    loads.set(xlabel="round", ylabel="samples of the round", ylim=(0, None))
    loads.set_title("who does how much", loc="left", fontsize=10)
    loads.legend(frameon=False, fontsize=8)
    seconds.step(rounds, run.seconds, where="mid", color=COLOURS[0], label="level")
    seconds.axhline(
        BATCH / 4 * SLOW, color=COLOURS[1], linestyle="--", label="equal shares, computation alone"
    )
    seconds.axhline(BATCH / (3 / FAST + 1 / SLOW), color=GREY, linestyle=":", label="the bound")
    seconds.set(xlabel="round", ylabel="seconds of the round", ylim=(0, None))
    seconds.set_title("how long it takes", loc="left", fontsize=10)
    seconds.legend(frameon=False, fontsize=8)
    save(made, __file__, ".png")


if __name__ == "__main__":
    main()
