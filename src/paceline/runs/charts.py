"""The pictures of a run, or of some of its rounds, each a figure for the report and the live page."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

import numpy as np

from paceline.runs import draw
from paceline.runs.columns import BANDS, Window
from paceline.runs.draw import amount_axis, percent_axis, round_axis, time_axis, top
from paceline.runs.run import Array
from paceline.runs.words import listing, number, percent, plural, seconds, times

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
    x, known = _middles(window.edges), ~np.isnan(real.mean)
    many = len(x) < window.end - window.start
    band = (real.low[known], real.high[known]) if many else (None, None)
    average = " (average, and from the fastest to the slowest)" if many else ""
    series = [
        draw.Line("round", "c0", x[known], real.mean[known], *band),
        draw.Line("split by speed", "good", x[known], ideal[known], dashed=True),
    ]
    tips = [tip for tip, there in zip(_tips(window.edges), known, strict=True) if there]
    shown = [("c0", "measured"), ("good dashes", "split by speed (the bound)")]
    lost = [("bad upright", "a worker was lost or left")] if window.lost else []
    columns = (column[known] for column in (real.mean, real.low, real.high, ideal))
    return draw.figure(
        "Time per round",
        f"Seconds of each round{average}; dashed: the same samples split by the workers' speeds"
        f"{_lost(window)}{cut}{_without(window)}.",
        draw.lines(
            series,
            round_axis(window.span),
            time_axis("time of a round", end),
            seconds,
            _round_tip(window.edges),
            [number + 0.5 for number in window.lost],
        ),
        draw.legend([*shown, *lost]),
        table=draw.table(
            ("rounds", "average", "fastest", "slowest", "split by speed"), _in_words(tips, seconds, *columns)
        ),
    )


def loads(window: Window) -> str:
    """How the batch was divided; as portions of it where not all rounds have the same."""
    if not window.uneven:
        texts = _texts(window.loads, number)
        return _divided(window, window.loads, "Samples that each worker ran", texts, number, "load (samples)")
    says = "Part of the batch that each worker ran"
    of = [
        [
            f"{percent(part, 1)} ({number(load)} samples)" if part == part else "–"
            for part, load in zip(*row, strict=True)
        ]
        for row in zip(window.portions.tolist(), window.loads.tolist(), strict=True)
    ]
    return _divided(window, window.portions, says, of, lambda part: percent(part, 1), "")


def pace(window: Window) -> str:
    """How long each worker takes for a sample."""
    title, says = "Speed of each worker", "Seconds that each worker took for one sample"
    texts, values, cells = _texts(window.pace, seconds), window.pace, window.cells
    if window.workers > BANDS:
        return _map(window, title, says, values, texts, seconds)
    series = [draw.Line(name, f"c{i}", _middles(cells), values[:, i]) for i, name in enumerate(names(window))]
    y_axis = time_axis("time for a sample", top(values))
    content = draw.lines(series, round_axis(window.span), y_axis, seconds, _round_tip(cells))
    return draw.figure(title, f"{says}.", content, _who(window), table=_each(window, texts))


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
    return draw.figure(
        "Loss against time",
        f"Training loss, by the seconds since the run started{_where(runs[0][1], ', ')}.",
        draw.lines(
            series,
            time_axis("time since the start", end, start, 5),
            amount_axis("training loss", high),
            number,
            lambda x: f"after {seconds(x)}",
        ),
        legend,
        table=_over_time(series, start, end),
    )


def _over_time(series: Sequence[draw.Line], start: float, end: float) -> str:
    """What each curve had reached at a dozen times; nothing before its first value, and after its last one."""
    rows = []
    for time in np.linspace(start, end, TABLE + 1)[1:]:
        reached = []
        for line in series:
            place = int(np.searchsorted(line.x, time * (1 + 1e-9), side="right")) - 1
            over = time > line.x[-1] * (1 + 1e-9)
            reached.append("–" if place < 0 or over else number(float(line.y[place])))
        rows.append((seconds(float(time)), *reached))
    return draw.table(("after", *(line.name for line in series)), rows)


def overview(window: Window) -> str:
    """The seconds of all rounds in a strip, to choose some of them from."""
    real, known = window.seconds, ~np.isnan(window.seconds.mean)
    x = _middles(window.edges)[known]
    line = draw.Line("round", "c0", x, real.mean[known], real.low[known], real.high[known])
    # Not marked as an axis of rounds: the live page zooms there by a brush of its own.
    return draw.strip(line, round_axis(window.span)._replace(rounds=False), top(window.lengths))


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
    x_axis, tip, tips = round_axis(window.span), _round_tip(window.edges), _tips(window.edges)
    high = 1.1 * top(server["quorum"], server["present"])
    waited = draw.figure(
        "Whom each update waited for",
        "k: the gradients that an update waited for; dashed: the workers that were there.",
        draw.lines(quorum, x_axis, amount_axis("gradients and workers (number)", high), number, tip),
        draw.legend([("c0", "k"), ("good dashes", "workers present")]),
        table=draw.table(
            ("updates", "k", "present"), _in_words(tips, number, server["quorum"], server["present"])
        ),
    )
    high = max(1.0, 1.05 * top(server["staleness"], server["dropped"]))
    wasted = draw.figure(
        "Staleness and waste",
        "How many updates old the used gradients were, on average; dashed: gradients that went unused, an update.",
        draw.lines(lost, x_axis, amount_axis("updates and gradients (number)", high), number, tip),
        draw.legend([("c1", "staleness"), ("bad dashes", "unused gradients")]),
        table=draw.table(
            ("updates", "staleness", "unused"),
            _in_words(tips, number, server["staleness"], server["dropped"]),
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


def _divided(
    window: Window, values: Array, says: str, texts: list[list[str]], text: Callable[[float], str], unit: str
) -> str:
    """What each worker had of a round; the unit of its axis, or "" for portions."""
    title = "Load per worker"
    if window.workers > BANDS:
        return _map(window, title, says, values, texts, text)
    cells, most = window.cells, float(np.nansum(values, axis=1).max()) or 1.0
    y_axis = amount_axis(unit, most) if unit else percent_axis("part of the batch", most)
    content = draw.areas(names(window), cells, values, round_axis(window.span), y_axis, texts, _tips(cells))
    says = f"{says}, on top of one another."
    return draw.figure(title, says, content, _who(window), table=_each(window, texts))


def _map(
    window: Window, title: str, says: str, values: Array, texts: list[list[str]], text: Callable[[float], str]
) -> str:
    """One row a worker, coloured by its values, where they are too many for curves."""
    rows, cells = window.rows(ROWS), window.cells
    table = draw.table(("rounds", "least", "median", "most"), _in_words(_tips(cells), text, *_spread(values)))
    some = "" if window.workers <= ROWS else f" ({ROWS} of {window.workers:,} workers, by speed)"
    shown = [[row[i] for i in rows] for row in texts]
    x_axis = round_axis(window.span)
    content = draw.heat([str(i) for i in rows], cells, values[:, rows], x_axis, text, shown, _tips(cells))
    return draw.figure(title, f"{says}, one row a worker{some}.", content, table=table)


def _who(window: Window) -> str:
    return draw.legend([(f"c{i}", name) for i, name in enumerate(names(window))])


def _each(window: Window, texts: list[list[str]]) -> str:
    """A table with a column for each worker."""
    tips = _tips(window.cells)
    rows = [(tips[i], *texts[i]) for i in _chosen(len(tips))]
    return draw.table(("rounds", *names(window)), rows)


def _texts(values: Array, text: Callable[[float], str]) -> list[list[str]]:
    return [[text(value) for value in row] for row in values.tolist()]


def _where(window: Window, before: str = " ") -> str:
    """Which rounds a picture without round numbers tells of, where these are not all."""
    first, end = window.span
    return "" if window.whole else f"{before}in rounds {first:,.0f} to {end - 1:,.0f}"


def _lost(window: Window) -> str:
    if not window.lost:
        return ""
    rounds = [f"{number:,}" for number in window.lost]
    which = f"in {plural(len(rounds), 'round')}" if len(rounds) > TABLE else f"in round {listing(rounds)}"
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


def _spread(values: Array) -> tuple[Array, Array, Array]:
    """The least, the median and the most of each row of which anything is known."""
    known = np.where(np.isnan(values).all(axis=1, keepdims=True), 0.0, values)
    return np.nanmin(known, axis=1), np.nanmedian(known, axis=1), np.nanmax(known, axis=1)


def _chosen(count: int) -> list[int]:
    """Places of a dozen rows for a table."""
    return [int(i) for i in np.unique(np.linspace(0, count - 1, min(count, TABLE)).astype(int))]


def _in_words(tips: Sequence[str], text: Callable[[float], str], *columns: Array) -> list[tuple[str, ...]]:
    return [(tips[i], *(text(float(column[i])) for column in columns)) for i in _chosen(len(tips))]


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
