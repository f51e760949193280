"""What a run's record tells of work that moved within its rounds."""

from __future__ import annotations

from typing import Any

import numpy as np

from paceline.runs.run import Run
from paceline.runs.words import percent, seconds

SCATTER_OF_CHANGES = 0.954  # median of the absolute difference of two normal numbers of sd 1


def figures(run: Run) -> dict[str, Any]:
    """For the summary; empty where the run's work could not move.

    moved_rounds: portion of the rounds in which it did. at_once: portion of the plan that those ran before
    anything was claimed, mean. pieces: of a worker in one of those, mean. piece_cost: seconds of a piece beyond
    its samples, median. pace_scatter: of the seconds per sample from round to round, relative.
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
    """What was chosen, planned or in pieces, and what for."""
    found = figures(run)
    if not found:
        return []
    scatter, cost = found["pace_scatter"], seconds(found["piece_cost"])
    why = "" if scatter is None else f": paces scatter by {percent(scatter)} from round to round"
    if not found["moved_rounds"]:
        return [f"Every round was run as planned{why}, and a piece costs {cost}."]
    return [
        f"Work moved within {percent(found['moved_rounds'])} of the rounds, {percent(found['at_once'])} of the plan "
        f"at once and {found['pieces']:.1f} pieces a worker{why}, and a piece costs {cost}."
    ]


def _kept(run: Run, name: str) -> list[Any]:
    return [value for value in run.extras.get(name, []) if value is not None]


def _numbers(run: Run, name: str) -> np.ndarray:
    return np.array(_kept(run, name), float)
