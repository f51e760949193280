"""The charts of a run, or of some of its rounds, each a figure for the report and the live page. The timeline shows
rounds as bars on one scale of time, compute against wait, worker by worker.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

import numpy as np

from paceline.runs import draw
from paceline.runs.columns import BANDS, Columns, Thin, Window
from paceline.runs.draw import Axis, amount_axis, percent_axis, round_axis, time_axis, top
from paceline.runs.run import Array
from paceline.runs.summary import median
from paceline.runs.words import listing, number, percent, plural, seconds, times

ROWS = 64  # most workers with a row each
BARS = 16  # most workers with a bar each


def thinned(window: Window, name: str, colour: str, x: Array, series: Thin) -> draw.Curve:
    """A curve through the buckets that have a value, with a band around it if a bucket holds several rounds."""
    known, many = ~np.isnan(series.mean), len(x) < window.end - window.start
    band = (series.low[known], series.high[known]) if many else ()
    return draw.Curve(name, colour, x[known], series.mean[known], *band)


def round_seconds(window: Window) -> str:
    """The chart of the time per round, against the time that a split by speed would take."""
    end = top(window.lengths, window.ideal)
    beyond = int((window.lengths > end).sum())
    cut = f"; {plural(beyond, 'round')} took longer than the scale shows" if beyond else ""
    x, known = window.middles, ~np.isnan(window.seconds.mean)
    real = thinned(window, "measured", "busy", x, window.seconds)
    average = "" if real.low is None else " (average; band: fastest to slowest)"
    return draw.curves(
        "Time per round",
        f"Seconds of each round{average}; dashed: the same samples split by the workers' speeds"
        f"{_lost(window)}{cut}{_without(window)}.",
        [real, draw.Curve("split by speed (the bound)", "good", x[known], window.ideal[known], dashed=True)],
        round_axis(window.span),
        time_axis("time of a round", end),
        seconds,
        _round_tip(window.edges),
        [number + 0.5 for number in window.lost],
    )


def loads(window: Window) -> str:
    """The chart of how the batch was divided; as portions of it if not all rounds have the same batch."""
    title = "Load per worker"
    if window.uneven:
        axis = percent_axis("part of the batch", top(window.portions))
        says = "Part of the batch that each worker ran"
        return _each(window, title, says, window.portions, axis, lambda part: percent(part, 1))
    axis = amount_axis("load (samples)", top(window.loads))
    return _each(window, title, "Samples that each worker ran", window.loads, axis, number)


def pace(window: Window) -> str:
    """The chart of each worker's seconds per sample."""
    axis = time_axis("time for a sample", top(window.pace))
    says = "Seconds that each worker took for one sample"
    return _each(window, "Speed of each worker", says, window.pace, axis, seconds)


def _each(window: Window, title: str, says: str, values: Array, y_axis: Axis, text: draw.Text) -> str:
    """A chart with a curve for each worker; if they are too many to distinguish, for some, and the median of all.

    values: shape (buckets, n). text: formats one value.
    """
    x, rows = window.middles, window.rows(BANDS)
    series = [draw.Curve(window.label(i), f"c{i % BANDS}", x, values[:, i]) for i in rows]
    if window.workers > len(rows):
        band = np.fmin.reduce(values, axis=1), np.fmax.reduce(values, axis=1)
        series.append(draw.Curve("median of all", "good", x, median(values.T), *band, dashed=True))
        says += f" ({len(rows)} of the {window.workers:,} workers, by speed; band: least to most of all)"
    x_axis = round_axis(window.span)
    return draw.curves(title, f"{says}.", series, x_axis, y_axis, text, _round_tip(window.edges))


def losses(runs: Sequence[tuple[str, Window]]) -> str:
    """The chart of the loss against time, one curve per run; empty if no run recorded a loss."""
    series = [
        thinned(window, name, f"r{i % BANDS}" if len(runs) > 1 else "busy", window.time, window.loss)
        for i, (name, window) in enumerate(runs)
        if not np.isnan(window.loss.mean).all()
    ]
    if not series:
        return ""
    start = 0.0 if any(not window.start for _, window in runs) else float(series[0].x[0])
    end = max(float(line.x[-1]) for line in series)
    if not end > start:
        start, end = 0.0, end or 1.0
    least = min(0.0, *(1.05 * float(np.nanmin(line.y)) for line in series))
    most = max(0.0, *(1.05 * float(np.nanmax(line.y)) for line in series))
    return draw.curves(
        "Loss against time",
        f"Training loss against the time since the run started{_where(runs[0][1], ', ')}.",
        series,
        time_axis("time since the start", end, start, 5),
        amount_axis("training loss", most if most > least else 1.0, least),
        number,
        lambda x: f"after {seconds(x)}",
    )


def rounds(named: Sequence[tuple[str, Window]]) -> str:
    """The chart of the time per round of several runs, one curve each."""
    series = []
    for i, (name, window) in enumerate(named):
        known = ~np.isnan(window.seconds.mean)
        series.append(draw.Curve(name, f"r{i % BANDS}", window.middles[known], window.seconds.mean[known]))
    spans = [window.span for _, window in named]
    short = any(window.short for _, window in named)
    return draw.curves(
        "Time per round",
        f"Seconds of each round{'; rounds with fewer samples are left out' if short else ''}.",
        series,
        round_axis((min(first for first, _ in spans), max(end for _, end in spans))),
        time_axis("time of a round", top(*(window.lengths for _, window in named))),
        seconds,
        lambda x: f"Round {int(x):,}",
    )


def overview(window: Window) -> str:
    """The seconds of all rounds in a strip, in which readers choose the rounds to show."""
    line = thinned(window, "round", "busy", window.middles, window.seconds)
    # Not marked as an axis of rounds: the live page has a separate brush to zoom here.
    return draw.strip(line, round_axis(window.span)._replace(rounds=False), top(window.lengths))


def gates(window: Window) -> list[str]:
    """The charts of a parameter server's run: gradients that an update waited for, staleness, unused gradients."""
    if not window.server:
        return []
    x, server = window.middles, window.server

    def two(title: str, says: str, unit: str, least: float, one: draw.Curve, other: draw.Curve) -> str:
        y_axis = amount_axis(f"{unit} (number)", max(least, 1.1 * top(one.y, other.y)))
        tip = _round_tip(window.edges)
        return draw.curves(title, says, [one, other], round_axis(window.span), y_axis, number, tip)

    return [
        two(
            "Gradients that each update waited for",
            "k: the number of gradients that an update waited for; dashed: the number of workers present.",
            "gradients and workers",
            0.0,
            draw.Curve("k", "busy", x, server["quorum"]),
            draw.Curve("workers present", "good", x, server["present"], dashed=True),
        ),
        two(
            "Staleness and waste",
            "Average age of the used gradients, in updates; dashed: unused gradients per update.",
            "updates and gradients",
            1.0,
            draw.Curve("staleness", "c1", x, server["staleness"]),
            draw.Curve("unused gradients", "bad", x, server["dropped"], dashed=True),
        ),
    ]


def stragglers(window: Window) -> str:
    """The chart of how often each worker was the straggler."""
    share, ratios = window.last, window.slowness
    order = np.argsort(-share, kind="stable")
    rows = sorted(int(i) for i in order[:BARS])
    whole = 1.0 if window.workers <= BARS else float(share.max()) or 1.0
    bars = [
        (window.label(i), [("bad", float(share[i]) / whole)], f"{percent(share[i])}{_pace(ratios[i])}")
        for i in rows
    ]
    if len(order) > len(rows):
        other = float(share[order[BARS:]].sum())
        bars.append((f"{len(order) - BARS} others", [("rest", min(other / whole, 1.0))], percent(other)))
    table = [
        (_short(window, i), percent(share[i], 1), times(ratios[i]) if ratios[i] == ratios[i] else "–")
        for i in order[:ROWS].tolist()
    ]
    return draw.figure(
        "Who was the straggler",
        "How often each worker was the last to finish a round, and its seconds per sample as a multiple of the "
        f"others' median{_where(window, ', ')}.",
        draw.bars(bars),
        table=draw.table(("worker", "last to finish", "seconds per sample / others' median"), table),
    )


def time_spent(window: Window) -> str:
    """The chart of how each worker's time was spent."""
    overhead, compute, wait = window.overhead, window.computed, window.waited
    whole = max(window.elapsed, float((overhead + compute + wait).max(initial=0.0))) or 1.0
    bars = []
    for i in window.rows(BARS):
        parts = [("over", overhead[i] / whole), ("busy", compute[i] / whole), ("idle", wait[i] / whole)]
        bars.append((window.label(i), parts, f"waits {percent(wait[i] / whole)}"))
    some = "" if window.workers <= BARS else f" ({BARS} of the {window.workers:,} workers, by speed)"
    table = [
        (
            _short(window, i),
            *(seconds(part[i]) for part in (compute, overhead, wait)),
            percent(wait[i] / whole, 1),
        )
        for i in window.rows(ROWS)
    ]
    return draw.figure(
        "Where the time went",
        f"Each worker's seconds{_where(window) or ', all rounds together'}{some}. The empty rest of a bar is "
        "the exchange of gradients, the optimizer's step and the like.",
        draw.bars(bars),
        _legend(overhead),
        table=draw.table(("worker", "computing", "overhead", "waiting", "waiting, share of time"), table),
    )


def _short(window: Window, worker: int) -> str:
    """A worker in a table whose column says that it is one."""
    return window.label(worker).removeprefix("worker ")


def _where(window: Window, before: str = " ") -> str:
    """A clause on the rounds in a chart without an axis of rounds; empty if it shows all rounds."""
    first, end = window.span
    return "" if window.whole else f"{before}in rounds {first:,.0f} to {end - 1:,.0f}"


def _lost(window: Window) -> str:
    if not window.lost:
        return ""
    rounds = [f"{number:,}" for number in window.lost]
    which = plural(len(rounds), "round") if len(rounds) > draw.TABLE else f"round {listing(rounds)}"
    return f"; vertical lines: workers were lost or left in {which}"


def _without(window: Window) -> str:
    are = "is" if window.short == 1 else "are"
    return f"; {plural(window.short, 'round')} with fewer samples {are} left out" if window.short else ""


def _pace(ratio: float) -> str:
    if not ratio > 0:
        return ""
    return f" · {times(max(ratio, 1 / ratio))} {'slower' if ratio >= 1 else 'faster'}"


def _round_tip(at: Array) -> Callable[[float], str]:
    tips = [
        f"Round {first:,}" if end - first == 1 else f"Rounds {first:,} to {end - 1:,}"
        for first, end in pairwise(at.astype(int).tolist())
    ]
    return lambda x: tips[min(max(int(np.searchsorted(at, x, side="right")) - 1, 0), len(tips) - 1)]


NAMED = 16  # up to this many rows have the word "worker" in their label
SHOWN = 10  # rounds in a panel of the timeline


def timeline(columns: Columns, start: int, end: int) -> str:
    """The chart of compute against wait per worker, for the first, the middle and the last rounds of a range."""
    total, shown = end - start, min(SHOWN, end - start)
    starts = sorted({0, total - shown} | ({(total - shown) // 2} if total >= 3 * shown else set()))
    if total < 2 * shown:
        starts = [0]
        shown = min(total, 2 * SHOWN)
    starts = [start + offset for offset in starts]
    numbers = columns["round"]
    parts = [
        (f"Rounds {numbers[at]:,.0f} to {numbers[at + shown - 1]:,.0f}", columns, at, at + shown)
        for at in starts
    ]
    some = "" if columns.workers <= ROWS else f"; {ROWS} of the {columns.workers:,} workers, by speed"
    same = "All panels have the same scale, so a shorter panel is faster. " if len(parts) > 1 else ""
    return strips("Compute and wait", f"{same}Each row is a worker; a line ends each round{some}.", parts)


def strips(title: str, says: str, parts: Sequence[tuple[str, Columns, int, int]], what: str = "") -> str:
    """A figure of several ranges of rounds on one scale of time: (name, columns, first index, end index).

    what: the heading of the names in the table if they are names of runs.
    """
    sums = [columns.sums(start, end)[2] for _, columns, start, end in parts]
    lengths = [float(columns["seconds"][start:end].sum()) for _, columns, start, end in parts]
    panels = [
        f"<div><h4>{draw.escape(name)}{f': {seconds(length)}' if what else ''}</h4>"
        f"{_strip(columns, start, end, max(lengths))}</div>"
        for (name, columns, start, end), length in zip(parts, lengths, strict=True)
    ]
    return draw.figure(
        title,
        says,
        f'<div class="strips">{"".join(panels)}</div>',
        _legend(np.concatenate(sums), ("bad", "the straggler")),
        wide=True,
        table=_strips_table(parts, what),
    )


def _strip(columns: Columns, start: int, end: int, span: float) -> str:
    """The rounds from index ``start`` to before ``end``, on a scale of ``span`` seconds."""
    run, rows = columns.part(start, end), columns.rows(ROWS)
    place = {worker: row for row, worker in enumerate(rows)}
    bars, clock = [], 0.0
    for t, length in enumerate(run.seconds.tolist()):
        each = np.nan_to_num(run.loads[t, rows]), run.compute[t, rows], run.wait[t, rows]
        texts = [
            f"{plural(round(load), 'sample')}, computed {seconds(spent)}, waited {seconds(idle)}"
            if spent == spent
            else "absent"
            for load, spent, idle in np.transpose(each).tolist()
        ]
        if (last := place.get(int(columns["late"][start + t]), -1)) >= 0:
            texts[last] += " (the straggler)"
        title, overhead = f"Round {run.round[t]:,} · {seconds(length)}", np.nan_to_num(run.overhead[t, rows])
        bars.append(draw.Bars(title, clock, length, each[1], overhead, each[2], last, texts))
        clock += length
    span = span or 1.0  # rounds that took no time at all
    labels = [f"{i}" if run.workers > NAMED else columns.label(i) for i in rows]
    return draw.gantt(labels, bars, time_axis("time", span))


def _legend(overhead: Array, *more: tuple[str, str]) -> str:
    """The legend of the boxes; overhead: its seconds, shown if they are more than 0."""
    extra = [("over", "overhead")] if overhead.sum() > 0 else []
    return draw.legend([("busy", "computing"), *more, *extra, ("idle", "waiting")])


def _strips_table(parts: Sequence[tuple[str, Columns, int, int]], what: str) -> str:
    rows = []
    for name, columns, start, end in parts:
        for t in range(start, end):
            compute, _, wait = (np.nan_to_num(values) for values in columns.sums(t, t + 1)[1:4])
            late, number = int(columns["late"][t]), f"{columns['round'][t]:,.0f}"
            whom = "none" if late < 0 else f"worker {late}"
            took = (seconds(float(each.sum())) for each in (compute, wait))
            first = (name, number) if what else (number,)
            rows.append((*first, seconds(float(columns["seconds"][t])), whom, *took))
    head = ("round", "took", "straggler", "all workers' computing", "all workers' waiting")
    return draw.table((what, *head) if what else head, rows)
