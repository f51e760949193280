"""Figures and sentences about work that moved between workers while a round ran."""

from __future__ import annotations

from typing import Any

import numpy as np

from paceline.runs.run import Run
from paceline.runs.words import percent, seconds

SCATTER_OF_CHANGES = 0.954  # median of the absolute difference of two normal numbers of sd 1


def figures(run: Run) -> dict[str, Any]:
    """For the summary; empty where the run's work could not move.

    moved_rounds: portion of the rounds in which work moved. In those rounds, at_once: portion of the plan that was
    assigned up front, mean; pieces: number per worker, mean. piece_cost: seconds that a piece takes beyond its
    samples, median. pace_scatter: relative standard deviation of the seconds per sample from round to round.
    """
    at_once = _numbers(run, "at_once")
    if not len(at_once):
        return {}
    moved = at_once < 1
    rounds = [pieces for pieces, in_parts in zip(_kept(run, "pieces"), moved, strict=False) if in_parts]
    counts = [len(pieces) for workers in rounds for pieces in workers]
    with np.errstate(divide="ignore", invalid="ignore"):
        changes = np.abs(np.diff(np.log(run.compute / run.loads), axis=0))
    changes = changes[np.isfinite(changes)]
    return {
        "moved_rounds": float(moved.mean()),
        "at_once": float(at_once[moved].mean()) if moved.any() else 1.0,
        "pieces": float(np.mean(counts)) if counts else 1.0,
        "piece_cost": float(np.median(_numbers(run, "piece_cost"))),
        "pace_scatter": float(np.median(changes)) / SCATTER_OF_CHANGES if len(changes) else None,
    }


def sentences(run: Run) -> list[str]:
    """How often work moved within the rounds, and the two figures that decide about it."""
    found = figures(run)
    if not found:
        return []
    if found["moved_rounds"]:
        what = (
            f"In {percent(found['moved_rounds'])} of the rounds, work was rebalanced while the round ran: "
            f"{percent(found['at_once'])} was assigned up front and the rest was claimed, in {found['pieces']:.1f} "
            "pieces per worker."
        )
    else:
        what = "Every round ran as planned: no work was rebalanced while a round ran."
    cost = f"An extra piece costs {seconds(found['piece_cost'])}"
    scatter = found["pace_scatter"]
    why = (
        ""
        if scatter is None
        else f", and the time per sample varies by {percent(scatter)} from round to round"
    )
    return [what, f"{cost}{why}."]


def _kept(run: Run, name: str) -> list[Any]:
    return [value for value in run.extras.get(name, []) if value is not None]


def _numbers(run: Run, name: str) -> np.ndarray:
    return np.array(_kept(run, name), float)
