"""The pictures of a run, or of some of its rounds, each a figure for the report and the live page."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

import numpy as np

from paceline.runs import draw
from paceline.runs.columns import BANDS, Thin, Window
from paceline.runs.run import Array
from paceline.runs.svg import amount_axis, percent_axis, round_axis, time_axis, top
from paceline.runs.words import listing, number, percent, plural, seconds, times

ROWS = 64  # up to this many workers have a row of their own
BARS = 16  # up to this many have a bar of their own


def thinned(window: Window, name: str, colour: str, x: Array, series: Thin) -> draw.Line:
    """A curve of buckets of which anything is known, with a band around it if these hold several rounds."""
    known, many = ~np.isnan(series.mean), len(x) < window.end - window.start
    band = (series.low[known], series.high[known]) if many else ()
    return draw.Line(name, colour, x[known], series.mean[known], *band)


def round_seconds(window: Window) -> str:
    """Time per round against what a split by speed would take."""
    end = top(window.lengths, window.ideal)
    beyond = int((window.lengths > end).sum())
    cut = f"; {plural(beyond, 'round')} went beyond the scale" if beyond else ""
    x, known = _middles(window.edges), ~np.isnan(window.seconds.mean)
    real = thinned(window, "measured", "c0", x, window.seconds)
    average = "" if real.low is None else " (average, and from the fastest to the slowest)"
    return draw.curves(
        "Time per round",
        f"Seconds of each round{average}; dashed: the same samples split by the workers' speeds"
        f"{_lost(window)}{cut}{_without(window)}.",
        [real, draw.Line("split by speed (the bound)", "good", x[known], window.ideal[known], dashed=True)],
        round_axis(window.span),
        time_axis("time of a round", end),
        seconds,
        _round_tip(window.edges),
        [number + 0.5 for number in window.lost],
    )


def loads(window: Window) -> str:
    """How the batch was divided; as portions of it if not all rounds have the same."""
    values, says = window.loads, "Samples that each worker ran"
    text: Callable[[float], str] = number
    texts = [[number(load) for load in row] for row in window.loads.tolist()]
    if window.uneven:
        values, says = window.portions, "Part of the batch that each worker ran"
        text = percent_of_batch
        texts = [
            [
                f"{text(part)} ({load} samples)" if part == part else "–"
                for part, load in zip(*row, strict=True)
            ]
            for row in zip(values.tolist(), texts, strict=True)
        ]
    if window.workers > BANDS:
        return _map(window, "Load per worker", says, values, texts, text)
    most = float(np.nansum(values, axis=1).max()) or 1.0
    y_axis = percent_axis("part of the batch", most) if window.uneven else amount_axis("load (samples)", most)
    grid = draw.Grid(_names(window), window.cells, values, texts, _tips(window.cells))
    return draw.areas(
        "Load per worker", f"{says}, on top of one another.", grid, round_axis(window.span), y_axis
    )


def percent_of_batch(part: float) -> str:
    """A worker's part of the batch."""
    return percent(part, 1)


def pace(window: Window) -> str:
    """How long each worker takes for a sample."""
    title, says = "Speed of each worker", "Seconds that each worker took for one sample"
    if window.workers > BANDS:
        texts = [[seconds(value) for value in row] for row in window.pace.tolist()]
        return _map(window, title, says, window.pace, texts, seconds)
    x = _middles(window.cells)
    series = [draw.Line(name, f"c{i}", x, window.pace[:, i]) for i, name in enumerate(_names(window))]
    axes = round_axis(window.span), time_axis("time for a sample", top(window.pace))
    return draw.curves(title, f"{says}.", series, *axes, seconds, _round_tip(window.cells))


def losses(runs: Sequence[tuple[str, Window]]) -> str:
    """Loss against time, one curve a run; empty if no run recorded any."""
    series = [
        thinned(window, name, f"c{i % BANDS}", window.time, window.loss)
        for i, (name, window) in enumerate(runs)
        if not np.isnan(window.loss.mean).all()
    ]
    if not series:
        return ""
    start = 0.0 if any(not window.start for _, window in runs) else float(series[0].x[0])
    end = max(float(line.x[-1]) for line in series)
    if not end > start:
        start, end = 0.0, end or 1.0
    return draw.curves(
        "Loss against time",
        f"Training loss, by the seconds since the run started{_where(runs[0][1], ', ')}.",
        series,
        time_axis("time since the start", end, start, 5),
        amount_axis("training loss", 1.05 * max(float(np.nanmax(line.y)) for line in series) or 1.0),
        number,
        lambda x: f"after {seconds(x)}",
    )


def rounds(named: Sequence[tuple[str, Window]]) -> str:
    """Time per round of several runs, a curve each."""
    series = [
        thinned(window, name, f"c{i % BANDS}", _middles(window.edges), window.seconds)._replace(
            low=None, high=None
        )
        for i, (name, window) in enumerate(named)
    ]
    spans = [window.span for _, window in named]
    short = any(window.short for _, window in named)
    return draw.curves(
        "Time per round",
        f"Seconds of each round{'; rounds of fewer samples are left out' if short else ''}.",
        series,
        round_axis((min(first for first, _ in spans), max(end for _, end in spans))),
        time_axis("time of a round", top(*(window.lengths for _, window in named))),
        seconds,
        lambda x: f"Round {int(x):,}",
    )


def overview(window: Window) -> str:
    """The seconds of all rounds in a strip, to choose some of them from."""
    x, real = _middles(window.edges), window.seconds
    known = ~np.isnan(real.mean)
    line = draw.Line("round", "c0", x[known], real.mean[known], real.low[known], real.high[known])
    # Not marked as an axis of rounds: the live page zooms there by a brush of its own.
    return draw.strip(line, round_axis(window.span)._replace(rounds=False), top(window.lengths))


def gates(window: Window) -> list[str]:
    """How many an update waited for, how stale gradients were, how many went unused; for a server's runs."""
    if not window.server:
        return []
    x, server = _middles(window.edges), window.server

    def two(title: str, says: str, unit: str, least: float, one: draw.Line, other: draw.Line) -> str:
        y_axis = amount_axis(f"{unit} (number)", max(least, 1.1 * top(one.y, other.y)))
        tip = _round_tip(window.edges)
        return draw.curves(title, says, [one, other], round_axis(window.span), y_axis, number, tip)

    return [
        two(
            "Whom each update waited for",
            "k: the gradients that an update waited for; dashed: the workers that were there.",
            "gradients and workers",
            0.0,
            draw.Line("k", "c0", x, server["quorum"]),
            draw.Line("workers present", "good", x, server["present"], dashed=True),
        ),
        two(
            "Staleness and waste",
            "How many updates old the used gradients were, on average; dashed: gradients without use, an update.",
            "updates and gradients",
            1.0,
            draw.Line("staleness", "c1", x, server["staleness"]),
            draw.Line("unused gradients", "bad", x, server["dropped"], dashed=True),
        ),
    ]


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
        bars.append((f"{len(order) - BARS} others", [("rest", min(other / whole, 1.0))], percent(other)))
    table = [
        (str(i), percent(share[i], 1), times(ratios[i]) if ratios[i] == ratios[i] else "–")
        for i in order[:ROWS].tolist()
    ]
    return draw.figure(
        "Who was the straggler",
        "Rounds in which each worker was the last to finish, and its seconds per sample against the others'"
        f"{_where(window, ', ')}.",
        draw.bars(bars),
        table=draw.table(("worker", "last of all", "seconds per sample, of the others' median"), table),
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
    table = [
        (str(i), *(seconds(part[i]) for part in (compute, overhead, wait)), percent(wait[i] / whole, 1))
        for i in window.rows(ROWS)
    ]
    return draw.figure(
        "Where the time went",
        f"Each worker's seconds{_where(window) or ', all rounds together'}{some}. What a bar leaves "
        "free went into the exchange of gradients, the optimizer's step and the like.",
        draw.bars(bars),
        draw.legend([("c0", "computing"), *extra, ("idle", "waiting")]),
        table=draw.table(("worker", "computing", "overhead", "waiting", "waiting, of the time"), table),
    )


def _map(
    window: Window, title: str, says: str, values: Array, texts: list[list[str]], text: Callable[[float], str]
) -> str:
    """A row for each worker, coloured by its values, if they are too many for curves."""
    grid = draw.Grid(_names(window), window.cells, values, texts, _tips(window.cells))
    some = "" if window.workers <= ROWS else f" ({ROWS} of {window.workers:,} workers, by speed)"
    says = f"{says}, one row a worker{some}."
    return draw.heat(title, says, grid, window.rows(ROWS), round_axis(window.span), text)


def _names(window: Window) -> list[str]:
    return [f"worker {i}" for i in range(window.workers)]


def _where(window: Window, before: str = " ") -> str:
    """Which rounds a picture without round numbers tells of, where these are not all."""
    first, end = window.span
    return "" if window.whole else f"{before}in rounds {first:,.0f} to {end - 1:,.0f}"


def _lost(window: Window) -> str:
    if not window.lost:
        return ""
    rounds = [f"{number:,}" for number in window.lost]
    which = (
        f"in {plural(len(rounds), 'round')}" if len(rounds) > draw.TABLE else f"in round {listing(rounds)}"
    )
    return f"; upright: workers were lost or left {which}"


def _without(window: Window) -> str:
    left_out = (
        "1 round of fewer samples is"
        if window.short == 1
        else f"{window.short:,} rounds of fewer samples are"
    )
    return f"; {left_out} left out" if window.short else ""


def _pace(ratio: float) -> str:
    return f" · {times(ratio)}" if ratio == ratio else ""


def _middles(at: Array) -> Array:
    return (at[:-1] + at[1:]) / 2


def _tips(at: Array) -> list[str]:
    return [
        f"Round {first:,}" if end - first == 1 else f"Rounds {first:,} to {end - 1:,}"
        for first, end in pairwise(at.astype(int).tolist())
    ]


def _round_tip(at: Array) -> Callable[[float], str]:
    tips = _tips(at)
    return lambda x: tips[min(max(int(np.searchsorted(at, x, side="right")) - 1, 0), len(tips) - 1)]
