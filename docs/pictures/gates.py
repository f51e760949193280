"""Draws gates.svg: what four workers do under each gate, and when parameters move. Virtual clock.

python docs/pictures/gates.py
"""

from __future__ import annotations

import numpy as np
from common import BLUE, ORANGE, figure, save, waiting

from paceline.paramserver.config import ServerConfig
from paceline.paramserver.samples import Draws
from paceline.simulate.server import RoundTrips, SimulatedServer
from paceline.simulate.timing import Constant

GATES = ("bsp", "ssp:1", "lsp:2:2", "asp")
SECONDS = np.array([1.0, 1.15, 1.3, 2.6])  # of a task, by worker
UNTIL = 12.0


class Nothing:
    """A learner whose gradients move nothing: the picture is about time."""

    def start(self) -> np.ndarray:
        return np.zeros(1)

    def gradient(self, values: np.ndarray, samples: object) -> tuple[np.ndarray, float]:
        return np.zeros(1), 1.0


class Logged(RoundTrips):
    """Round trips that remember when each task began and how long it took."""

    def __init__(self) -> None:
        super().__init__(len(SECONDS), Constant(0.0))
        self.tasks: list[tuple[int, float, float]] = []

    def seconds(self, worker: int, number: int, load: int, now: float) -> float:
        took = float(SECONDS[worker])
        self.tasks.append((worker, now, took))
        return took


def main() -> None:
    made, panels = figure(len(GATES), height=2.6, width=11, sharey=True)
    for axes, gate in zip(panels, GATES, strict=True):
        trips = Logged()
        updates = SimulatedServer(
            Nothing(), ServerConfig(len(SECONDS), 64, sync=gate), trips, Draws(1000, 0)
        ).run(seconds=UNTIL)
        waiting(axes, range(len(SECONDS)), UNTIL, 0)
        for worker, began, took in trips.tasks:
            length = min(took, UNTIL - began)
            axes.barh(worker, length, left=began, color=BLUE, edgecolor="white", linewidth=1, height=0.7)
        for update in updates:
            axes.axvline(update.ended, color=ORANGE, linewidth=1)
        done = sum(began + took <= UNTIL for _, began, took in trips.tasks)
        axes.set_title(f"{gate}: {done} tasks, {len(updates)} moves", loc="left", fontsize=9)
        axes.set(xlim=(0, UNTIL), xlabel="seconds")
        axes.set_yticks(range(len(SECONDS)), [f"worker {i}" for i in range(len(SECONDS))], fontsize=8)
        axes.spines["left"].set_visible(False)
        axes.tick_params(axis="y", length=0)
    panels[0].invert_yaxis()
    save(made, __file__)


if __name__ == "__main__":
    main()
