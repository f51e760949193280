"""Garbage collections that others wait for: each rank's own comes when its own count is full."""

from __future__ import annotations

import numpy as np

from paceline.runs import Run
from paceline.runs.run import waits
from paceline.runs.words import percent

WORTH_TELLING = 0.05  # of the waiting


def waited_for(run: Run) -> float:
    """Portion of all waiting that was for a rank that collected garbage, and would not have been without it."""
    told = run.extras.get("collecting")
    total = float(np.nansum(waits(run.seconds, run.compute)))
    if told is None or total <= 0:
        return 0.0
    collecting = np.array([each if each is not None else [0.0] * run.workers for each in told], float)
    without = run.compute - np.minimum(np.nan_to_num(collecting), run.compute)
    return max(total - float(np.nansum(waits(run.seconds, without))), 0.0) / total


def collections(run: Run) -> list[str]:
    """A sentence where enough of the waiting is for garbage collections; else none."""
    part = waited_for(run)
    if part < WORTH_TELLING:
        return []
    return [
        f"{percent(part)} of the waiting is for one rank's garbage collection at a time: "
        "Pace(collect_every=100), or gc.disable() and gc.collect() in the same steps on all ranks, ends that."
    ]
