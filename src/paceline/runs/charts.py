"""The pictures of a run, or of some of its rounds, each a figure for the report and the live page."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from paceline.runs import draw
from paceline.runs.axes import ticks, time_ticks, top
from paceline.runs.columns import BANDS, Window
from paceline.runs.run import Array
from paceline.runs.words import number, percent, plural, seconds, times

ROWS = 64  # up to so many workers have a row of their own
BARS = 16  # up to so many have a bar of their own
TABLE = 12  # rows of a table beside a picture


def names(window: Window) -> list[str]:
    """What the workers are called."""
    return [f"worker {i}" for i in range(window.workers)]


def round_seconds(window: Window) -> str:
    """Time per round against what a split by speed would take."""
    real, ideal = window.seconds, window.ideal
    end = top(window.lengths, ideal)
    beyond = int((window.lengths > end).sum())
    cut = f"; {plural(beyond, 'round')} went beyond the scale" if beyond else ""
    x = _middles(window.edges)
    many = len(x) < window.end - window.start
    band = " (average, and from the fastest to the slowest)" if many else ""
    series = [
        draw.Line("round", "c0", x, real.mean, real.low if many else None, real.high if many else None),
        draw.Line("split by speed", "good", x, ideal, dashed=True),
    ]
    rows = [
        (tip, seconds(mean), seconds(low), seconds(high), seconds(best))
        for tip, mean, low, high, best in _few(window.edges, real.mean, real.low, real.high, ideal)
    ]
    return draw.figure(
        "Time per round",
        f"Seconds of each round{band}; dashed: the same samples split by the workers' speeds{cut}.",
        draw.lines(series, window.span, end, _round_ticks(window), _count, seconds, _round_tip(window.edges)),
        draw.legend([("c0", "measured"), ("good dashes", "split by speed (the bound)")]),
        table=draw.table(("", "average", "fastest", "slowest", "split by speed"), rows),
    )


def loads(window: Window) -> str:
    """How the batch was divided."""
    says = "Samples that each worker ran"
    return _per_worker(window, window.loads, "Load per worker", says, number, stacked=True)


def pace(window: Window) -> str:
    """How long each worker takes for a sample."""
    says = "Seconds that each worker took for one sample"
    return _per_worker(window, window.pace, "Speed of each worker", says, seconds, stacked=False)


def losses(runs: Sequence[tuple[str, Window]]) -> str:
    """Loss against time, one curve a run; empty where no run recorded any."""
    series = []
    for i, (name, window) in enumerate(runs):
        loss = window.loss
        if np.isnan(loss.mean).all():
            continue
        many = len(loss.mean) < window.end - window.start
        band = (loss.low, loss.high) if many else (None, None)
        series.append(draw.Line(name, f"c{i % BANDS}", window.time, loss.mean, *band))
    if not series:
        return ""
    start = 0.0 if any(not window.start for _, window in runs) else float(series[0].x[0])
    end = max(float(line.x[-1]) for line in series)
    if not end > start:
        start, end = 0.0, end or 1.0
    high = 1.05 * max(float(np.nanmax(line.y)) for line in series) or 1.0
    legend = draw.legend([(line.colour, line.name) for line in series]) if len(runs) > 1 else ""
    table = ""
    if len(runs) == 1:
        window = runs[0][1]
        rows = [
            (tip, seconds(time), number(value))
            for tip, time, value in _few(window.edges, window.time, window.loss.mean)
        ]
        table = draw.table(("", "by", "loss"), rows)
    return draw.figure(
        "Loss against time",
        "Training loss, by the seconds since the run started.",
        draw.lines(
            series,
            (start, end),
            high,
            time_ticks(end, low=start),
            seconds,
            number,
            lambda x: f"after {seconds(x)}",
            rounds=False,
        ),
        legend,
        table=table,
    )


def overview(window: Window) -> str:
    """The seconds of all rounds in a strip, to choose some of them from."""
    real = window.seconds
    line = draw.Line("round", "c0", _middles(window.edges), real.mean, real.low, real.high)
    return draw.strip(line, window.span, top(window.lengths), _round_ticks(window), _count)


def gates(window: Window) -> list[str]:
    """How many an update waited for, how stale gradients were, how many went unused; for a server's runs."""
    if not window.server:
        return []
    x, server = _middles(window.edges), window.server
    quorum = [
        draw.Line("k", "c0", x, server["quorum"]),
        draw.Line("workers present", "good", x, server["present"], dashed=True),
    ]
    lost = [
        draw.Line("staleness", "c1", x, server["staleness"]),
        draw.Line("unused gradients", "bad", x, server["dropped"], dashed=True),
    ]
    at, tip = _round_ticks(window), _round_tip(window.edges)
    high = 1.1 * top(server["quorum"], server["present"])
    waited = draw.figure(
        "Whom each update waited for",
        "k: the gradients that an update waited for; dashed: the workers that were there.",
        draw.lines(quorum, window.span, high, at, _count, number, tip),
        draw.legend([("c0", "k"), ("good dashes", "workers present")]),
        table=draw.table(
            ("", "k", "present"), _in_words(window.edges, number, server["quorum"], server["present"])
        ),
    )
    high = max(1.0, 1.05 * top(server["staleness"], server["dropped"]))
    wasted = draw.figure(
        "Staleness and waste",
        "How many updates old the used gradients were, on average; dashed: gradients that went unused, an update.",
        draw.lines(lost, window.span, high, at, _count, number, tip),
        draw.legend([("c1", "staleness"), ("bad dashes", "unused gradients")]),
        table=draw.table(
            ("", "staleness", "unused"),
            _in_words(window.edges, number, server["staleness"], server["dropped"]),
        ),
    )
    return [waited, wasted]


def stragglers(window: Window) -> str:
    """Who was last, how often."""
    share, ratios = window.last, window.slowness
    order = np.argsort(-share, kind="stable")
    rows = sorted(int(i) for i in order[:BARS])
    whole = 1.0 if window.workers <= BARS else float(share.max()) or 1.0
    bars = [
        (f"worker {i}", [("bad", float(share[i]) / whole)], f"{percent(share[i])}{_pace(ratios[i])}")
        for i in rows
    ]
    if len(order) > len(rows):
        other = float(share[order[BARS:]].sum())
        bars.append((f"{len(order) - BARS} others", [("idle", min(other / whole, 1.0))], percent(other)))
    return draw.figure(
        "Who was the straggler",
        "Rounds in which each worker was the last to finish, and its seconds per sample against the others'.",
        draw.bars(bars),
    )


def time_spent(window: Window) -> str:
    """Where each worker's time went."""
    overhead, compute, wait = window.overhead, window.computed, window.waited
    whole = max(window.elapsed, float((overhead + compute + wait).max(initial=0.0))) or 1.0
    bars = []
    for i in window.rows(BARS):
        parts = [("over", overhead[i] / whole), ("c0", compute[i] / whole), ("idle", wait[i] / whole)]
        bars.append((f"worker {i}", parts, f"waits {percent(wait[i] / whole)}"))
    some = "" if window.workers <= BARS else f" ({BARS} of the {window.workers:,} workers, by speed)"
    extra = [("over", "overhead")] if overhead.sum() > 0 else []
    return draw.figure(
        "Where the time went",
        f"Each worker's seconds, all rounds together{some}. What a bar leaves free went into the exchange of "
        "gradients, the optimizer's step and the like.",
        draw.bars(bars),
        draw.legend([("c0", "computing"), *extra, ("idle", "waiting")]),
    )


def _per_worker(
    window: Window, values: Array, title: str, says: str, text: Callable[[float], str], stacked: bool
) -> str:
    cells, at = window.cells, _round_ticks(window)
    if window.workers > BANDS:
        rows = window.rows(ROWS)
        table = draw.table(("", "least", "median", "most"), _in_words(cells, text, *_spread(values)))
        some = "" if window.workers <= ROWS else f" ({ROWS} of {window.workers:,} workers, by speed)"
        content = draw.heat([str(i) for i in rows], cells, values[:, rows], at, _count, text, _tips(cells))
        return draw.figure(title, f"{says}, one row a worker{some}.", content, table=table)
    table = draw.table(("", *names(window)), _in_words(cells, text, *values.T))
    legend = draw.legend([(f"c{i}", name) for i, name in enumerate(names(window))])
    if stacked:
        content = draw.areas(names(window), cells, values, at, _count, text, _tips(cells))
        return draw.figure(title, f"{says}, on top of one another.", content, legend, table=table)
    x = _middles(cells)
    series = [draw.Line(name, f"c{i}", x, values[:, i]) for i, name in enumerate(names(window))]
    content = draw.lines(series, window.span, top(values), at, _count, text, _round_tip(cells))
    return draw.figure(title, f"{says}.", content, legend, table=table)


def _pace(ratio: float) -> str:
    return f" · {times(ratio)}" if ratio == ratio else ""


def _count(value: float) -> str:
    return f"{value:,.0f}"


def _spread(values: Array) -> tuple[Array, Array, Array]:
    """The least, the median and the most of each row of which anything is known."""
    known = np.where(np.isnan(values).all(axis=1, keepdims=True), 0.0, values)
    return np.nanmin(known, axis=1), np.nanmedian(known, axis=1), np.nanmax(known, axis=1)


def _few(at: Array, *columns: Array) -> list[tuple[Any, ...]]:
    """A dozen rows of a table: what the buckets between ``at`` are called, and the columns there."""
    count = len(at) - 1
    chosen = np.unique(np.linspace(0, count - 1, min(count, TABLE)).astype(int))
    tips = _tips(at)
    return [(tips[i], *(float(column[i]) for column in columns)) for i in chosen]


def _in_words(at: Array, text: Callable[[float], str], *columns: Array) -> list[tuple[str, ...]]:
    return [(tip, *map(text, row)) for tip, *row in _few(at, *columns)]


def _middles(at: Array) -> Array:
    return (at[:-1] + at[1:]) / 2


def _round_ticks(window: Window) -> list[float]:
    first, end = window.span
    return ticks(end, 5, whole=True, low=first)


def _tips(at: Array) -> list[str]:
    return [
        f"Round {first:,}" if end - first == 1 else f"Rounds {first:,} to {end - 1:,}"
        for first, end in pairwise(at.astype(int).tolist())
    ]


def _round_tip(at: Array) -> Callable[[float], str]:
    tips = _tips(at)
    return lambda x: tips[min(max(int(np.searchsorted(at, x, side="right")) - 1, 0), len(tips) - 1)]
