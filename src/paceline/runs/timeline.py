"""Compute against wait, worker by worker: the rounds as bars on one scale of time."""

from __future__ import annotations

import numpy as np

from paceline.runs import draw
from paceline.runs.analysis import chosen, last
from paceline.runs.axes import time_ticks
from paceline.runs.run import Run
from paceline.runs.words import plural, seconds

ROWS = 64  # up to so many workers have a row each
NAMED = 16  # up to so many are named in full
SHOWN = 10  # rounds in a window
LATE = 1.1  # a straggler is marked when it takes so many times the median


def timeline(run: Run) -> str:
    """Compute against wait, worker by worker, for the first, the middle and the last rounds."""
    total, shown = len(run.round), min(SHOWN, len(run.round))
    starts = sorted({0, total - shown} | ({(total - shown) // 2} if total >= 3 * shown else set()))
    if total < 2 * shown:
        starts = [0]
        shown = min(total, 2 * SHOWN)
    span = max(float(run.seconds[start : start + shown].sum()) for start in starts)
    strips = []
    for start in starts:
        first, end = run.round[start], run.round[start + shown - 1]
        strips.append(f"<div><h4>Rounds {first:,} to {end:,}</h4>{strip(run, start, shown, span)}</div>")
    some = "" if run.workers <= ROWS else f"; {ROWS} of the {run.workers:,} workers, by speed"
    same = "All panels have one scale, so a shorter one is a faster one. " if len(strips) > 1 else ""
    return draw.figure(
        "Compute and wait",
        f"{same}Each row is a worker; a line closes each round{some}.",
        f'<div class="strips">{"".join(strips)}</div>',
        draw.legend(
            [("c0", "computing"), ("bad", "the straggler"), *overhead_entry(run), ("idle", "waiting")]
        ),
        wide=True,
    )


def strip(run: Run, start: int, shown: int, span: float) -> str:
    """One panel of a timeline: ``shown`` rounds from index ``start``, over ``span`` seconds."""
    who, rows = last(run), chosen(run, ROWS)
    place = {int(worker): row for row, worker in enumerate(rows)}
    bars, clock = [], 0.0
    for t in range(start, min(start + shown, len(run.round))):
        compute, wait = run.compute[t, rows], run.wait[t, rows]
        overhead = np.nan_to_num(run.overhead[t, rows])
        texts = [
            f"{plural(round(load), 'sample')}, computed {seconds(spent)}, waited {seconds(idle)}"
            if spent == spent
            else "absent"
            for load, spent, idle in zip(
                np.nan_to_num(run.loads[t, rows]).tolist(), compute.tolist(), wait.tolist(), strict=True
            )
        ]
        title = f"Round {run.round[t]:,} · {seconds(float(run.seconds[t]))}"
        everyone = run.compute[t][~np.isnan(run.compute[t])]
        behind = everyone.size > 1 and everyone.max() > LATE * np.median(everyone)
        straggler = place.get(int(who[t]), -1) if behind else -1
        bars.append(draw.Bars(title, clock, float(run.seconds[t]), compute, overhead, wait, straggler, texts))
        clock += float(run.seconds[t])
    span = span or 1.0  # rounds that took no time at all
    labels = [f"{i}" if run.workers > NAMED else f"worker {i}" for i in rows]
    return draw.gantt(labels, bars, span, time_ticks(span, 4), seconds)


def overhead_entry(run: Run) -> list[tuple[str, str]]:
    """The legend's entry for overhead, where any was reported."""
    return [("over", "overhead")] if np.nansum(run.overhead) > 0 else []
