"""Draws how.svg: three rounds of four workers under plain DDP, balanced, and with work that moves within the round.

python docs/pictures/how.py

Worker 3 takes four times as long per sample, and worker 1 three times as long in the last round only. The bars are
computed: loads by the speeds of the round before, and claims of the next piece by the worker that is free first.
"""

from __future__ import annotations

import numpy as np
from common import BLUE, GREEN, figure, save, waiting

from paceline.rounds import Plan
from paceline.shares import whole_samples

BATCH, PIECE, PORTION = (
    256,
    4,
    0.5,
)  # samples of a round and of a claimed piece; part of a plan that runs up front
PACES = np.array([[1, 1, 1, 4], [1, 1, 1, 4], [1, 3, 1, 4]]) / 1000  # seconds per sample, (rounds, workers)
TITLES = (
    "Plain DDP: all wait for worker 3",
    "Balanced: loads by the speeds of the round before",
    "Moved within the round (green: claimed)",
)


def planned(round_: int) -> np.ndarray:
    """Samples of each worker by the speeds of the round before."""
    speeds = 1 / PACES[max(round_ - 1, 0)]
    return whole_samples(Plan(speeds / speeds.sum()), BATCH)


def claimed(plan: np.ndarray, pace: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Seconds of each worker up front, and in claimed pieces."""
    first = np.floor(PORTION * plan)
    ends, rest = first * pace, BATCH - int(first.sum())
    up_front = ends.copy()
    while rest > 0:
        free = int(np.argmin(ends + PIECE * pace))
        ends[free] += min(PIECE, rest) * pace[free]
        rest -= PIECE
    return up_front, ends - up_front


def main() -> None:
    made, axes = figure(rows=3, height=5.4, width=4.6, sharex=True)
    workers = range(PACES.shape[1])
    for each, title in zip(axes, TITLES, strict=True):
        start = 0.0
        for round_, pace in enumerate(PACES):
            plan = np.full(len(pace), BATCH / len(pace)) if each is axes[0] else planned(round_)
            first, then = claimed(plan, pace) if each is axes[2] else (plan * pace, 0 * pace)
            end = (first + then).max()
            each.barh(workers, first, left=start, height=0.7, color=BLUE)
            each.barh(workers, then, left=start + first, height=0.7, color=GREEN)
            waiting(each, workers, end - first - then, start + first + then)
            start += end + 0.008
        each.set_title(f"{title}: {start - 0.008:.2f} s", loc="left", fontsize=9)
        each.set_yticks(workers, [f"worker {worker}" for worker in workers], fontsize=8)
        each.invert_yaxis()
    axes[2].set_xlabel("seconds of three rounds (hatched: waiting)")
    save(made, __file__)


if __name__ == "__main__":
    main()
