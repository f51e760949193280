"""Draws forecasts.svg: a recorded worker's speed and what is forecast of it. Needs the recorded traces.

PACELINE_DATA=... python docs/pictures/forecasts.py
"""

from __future__ import annotations

import numpy as np
from common import COLOURS, GREY, figure, save

from paceline.forecast import create
from paceline.forecast.series import google2011, recorded, walk
from paceline.papers import data_folder


def main() -> None:
    folder = data_folder()
    held = google2011(folder, np.random.default_rng(0), hold=10)
    made, panels = figure(2, width=10)
    for axes, series, worker, span, names, title in (
        (
            panels[0],
            recorded(folder),
            0,
            slice(700, 800),
            ("ema", "tracking"),
            "a recorded worker, machine shared",
        ),
        (panels[1], held, 3, slice(500, 600), ("ema", "ratio"), "a machine under Google's load of 2011"),
    ):
        rounds = np.arange(len(series.speed))[span]
        axes.plot(rounds, series.speed[span, worker], color=GREY, linewidth=1, label="speed")
        for name, colour in zip(names, COLOURS, strict=False):
            predicted = walk(create(name), series.speed, series.cpu, series.memory)
            axes.plot(rounds, predicted[span, worker], color=colour, linewidth=1.3, label=name)
        axes.set(xlabel="round", ylabel="samples/s", ylim=(0, None))
        axes.set_title(title, loc="left", fontsize=10)
        axes.legend(frameon=False, fontsize=8)
    save(made, __file__)


if __name__ == "__main__":
    main()
