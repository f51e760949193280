"""Draws backup.svg: loss against time where one waits for all, for the first k, or for as many as DBW says.

    python docs/pictures/backup.py

Real gradients (a small network on the embedded digits), virtual time; sixteen workers whose tasks take 20 ms and an
exponential stall of 45 ms on average.
"""

from __future__ import annotations

import numpy as np
from common import COLOURS, figure, plain, save

from paceline.simulate import Scenario, WorkerClass
from paceline.simulate.learning import learn, server_config
from paceline.simulate.timing import Constant, Exponential

WAYS = ("everyone", "dbw", "static:12", "static:8")
UNTIL = 12.0  # seconds


def main() -> None:
    stalls = Exponential(mean=0.045, shift=0.02)
    cluster = (WorkerClass(Constant(1e-4), overhead=stalls, count=16),)
    scenario = Scenario(workers=cluster, global_batch=512, rounds=400, seed=0)
    made, (curve, bars) = figure(2, gridspec_kw={"width_ratios": [3, 2]})
    for way, colour in zip(WAYS, COLOURS, strict=False):
        updates = learn(scenario, server_config(scenario, backup=way, mode="push-interrupt", lr=0.3)).updates
        now, loss = np.array([(u.ended, u.loss) for u in updates]).T
        smooth = np.convolve(loss, np.ones(5) / 5, "valid")
        shown = now[4:] < UNTIL
        curve.plot(now[4:][shown], smooth[shown], color=colour, label=way)
        bars.barh(way, 1e3 * np.diff(now).mean(), color=colour)
    curve.set(xlabel="virtual seconds", ylabel="training loss", yscale="log")
    plain(curve, 0.03, 0.1, 0.3, 1)
    curve.legend(frameon=False, fontsize=9)
    curve.set_title("16 workers that stall at random", loc="left", fontsize=10)
    bars.set(xlabel="milliseconds per update")
    bars.invert_yaxis()
    save(made, __file__)


if __name__ == "__main__":
    main()
