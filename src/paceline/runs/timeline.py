"""Compute against wait, worker by worker: the rounds as bars on one scale of time."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from paceline.runs import draw
from paceline.runs.columns import Columns
from paceline.runs.svg import time_axis
from paceline.runs.words import plural, seconds

ROWS = 64  # up to this many workers have a row each
NAMED = 16  # up to this many are named in full
SHOWN = 10  # rounds in a window


def timeline(columns: Columns, start: int = 0, end: int | None = None) -> str:
    """Compute against wait, worker by worker, for the first, the middle and the last rounds of a stretch."""
    end = len(columns) if end is None else end
    total, shown = end - start, min(SHOWN, end - start)
    starts = sorted({0, total - shown} | ({(total - shown) // 2} if total >= 3 * shown else set()))
    if total < 2 * shown:
        starts = [0]
        shown = min(total, 2 * SHOWN)
    starts = [start + offset for offset in starts]
    lengths = [float(columns["seconds"][at : at + shown].sum()) for at in starts]
    strips = []
    for at in starts:
        first, final = columns["round"][at], columns["round"][at + shown - 1]
        panel = strip(columns, at, at + shown, max(lengths))
        strips.append(f"<div><h4>Rounds {first:,.0f} to {final:,.0f}</h4>{panel}</div>")
    some = "" if columns.workers <= ROWS else f"; {ROWS} of the {columns.workers:,} workers, by speed"
    same = "All panels have one scale, so a shorter one is a faster one. " if len(strips) > 1 else ""
    return draw.figure(
        "Compute and wait",
        f"{same}Each row is a worker; a line closes each round{some}.",
        f'<div class="strips">{"".join(strips)}</div>',
        legend(bool(columns.sums(start, end)[2].sum() > 0)),
        wide=True,
        table=table([("", columns, at, at + shown) for at in starts], ""),
    )


def strip(columns: Columns, start: int, end: int, span: float) -> str:
    """One panel of a timeline: the rounds from place ``start`` to ``end``, over ``span`` seconds."""
    run, rows = columns.part(start, end), columns.rows(ROWS)
    place = {worker: row for row, worker in enumerate(rows)}
    late = columns["late"][start:end].astype(int).tolist()
    bars, clock = [], 0.0
    for t, length in enumerate(run.seconds.tolist()):
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
        if late[t] in place:
            texts[place[late[t]]] += " (the straggler)"
        title = f"Round {run.round[t]:,} · {seconds(length)}"
        bars.append(draw.Bars(title, clock, length, compute, overhead, wait, place.get(late[t], -1), texts))
        clock += length
    span = span or 1.0  # rounds that took no time at all
    labels = [f"{i}" if run.workers > NAMED else f"worker {i}" for i in rows]
    return draw.gantt(labels, bars, time_axis("time", span))


def legend(overhead: bool) -> str:
    """What the boxes are. overhead: whether there are any of it."""
    extra = [("over", "overhead")] if overhead else []
    return draw.legend([("c0", "computing"), ("bad", "the straggler"), *extra, ("idle", "waiting")])


def table(named: Sequence[tuple[str, Columns, int, int]], what: str) -> str:
    """The rounds of some strips: (name of the run, its columns, first and last place). what: the names' heading."""
    rows = []
    for name, columns, start, end in named:
        for t in range(start, end):
            compute, _, wait = (np.nan_to_num(values) for values in columns.sums(t, t + 1)[1:4])
            late = int(columns["late"][t])
            rows.append(
                (
                    *([name] if what else []),
                    f"{columns['round'][t]:,.0f}",
                    seconds(float(columns["seconds"][t])),
                    "none" if late < 0 else f"worker {late}",
                    seconds(float(compute.sum())),
                    seconds(float(wait.sum())),
                )
            )
    head = ("round", "took", "straggler", "all workers' computing", "all workers' waiting")
    return draw.table((what, *head) if what else head, rows)
