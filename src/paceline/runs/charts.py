"""The pictures of one run, each a figure for the report."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import numpy as np

from paceline.runs import draw
from paceline.runs.analysis import chosen, seconds_per_sample, slowness, straggler_share
from paceline.runs.axes import Thin, thin, ticks, time_ticks, top
from paceline.runs.run import Array, Run
from paceline.runs.summary import ideal_seconds
from paceline.runs.timeline import overhead_entry
from paceline.runs.words import number, percent, plural, seconds, times

BANDS = 8  # up to so many workers each has a colour of its own
ROWS = 64  # up to so many have a row of their own
BARS = 16  # up to so many have a bar of their own


def names(run: Run) -> list[str]:
    """What the workers are called."""
    return [f"worker {i}" for i in range(run.workers)]


def round_seconds(run: Run) -> str:
    """Time per round against what a split by speed would take."""
    real, ideal = thin(run.seconds), thin(ideal_seconds(run))
    end = top(run.seconds, ideal.mean)
    beyond = int((run.seconds > end).sum())
    cut = f"; {plural(beyond, 'round')} went beyond the scale" if beyond else ""
    x = _middles(run, real)
    many = len(real.mean) < len(run.round)
    band = " (average, and from the fastest to the slowest)" if many else ""
    series = [
        draw.Line("round", "c0", x, real.mean, real.low if many else None, real.high if many else None),
        draw.Line("split by speed", "good", x, ideal.mean, dashed=True),
    ]
    return draw.figure(
        "Time per round",
        f"Seconds of each round{band}; dashed: the same samples split by the workers' speeds{cut}.",
        draw.lines(series, _rounds(run), end, _round_ticks(run), _count, seconds, _round_tip(run, real)),
        draw.legend([("c0", "measured"), ("good", "split by speed (the bound)")]),
    )


def loads(run: Run) -> str:
    """How the batch was divided."""
    return _per_worker(
        run,
        run.loads,
        "Load per worker",
        "Samples that each worker ran",
        lambda value: number(value),
        stacked=True,
    )


def pace(run: Run) -> str:
    """How long each worker takes for a sample."""
    says = "Seconds that each worker took for one sample"
    return _per_worker(run, seconds_per_sample(run), "Speed of each worker", says, seconds, stacked=False)


def losses(runs: list[tuple[str, Run]]) -> str:
    """Loss against time, one curve a run; empty where no run recorded any."""
    series = []
    for i, (name, run) in enumerate(runs):
        if np.isnan(run.loss).all():
            continue
        loss = thin(run.loss)
        many = len(loss.mean) < len(run.loss)
        x = run.time[loss.edges[1:] - 1]
        series.append(
            draw.Line(
                name, f"c{i % BANDS}", x, loss.mean, loss.low if many else None, loss.high if many else None
            )
        )
    if not series:
        return ""
    end = max(float(line.x[-1]) for line in series) or 1.0
    high = 1.05 * max(float(np.nanmax(line.y)) for line in series) or 1.0
    legend = draw.legend([(line.colour, line.name) for line in series]) if len(runs) > 1 else ""
    return draw.figure(
        "Loss against time",
        "Training loss, by the seconds since the run started.",
        draw.lines(
            series, (0.0, end), high, time_ticks(end), seconds, number, lambda x: f"after {seconds(x)}"
        ),
        legend,
    )


def stragglers(run: Run) -> str:
    """Who was last, how often."""
    share, ratios = straggler_share(run), slowness(run)
    order = np.argsort(-share, kind="stable")
    rows = sorted(int(i) for i in order[:BARS])
    whole = 1.0 if run.workers <= BARS else float(share.max()) or 1.0
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


def time_spent(run: Run) -> str:
    """Where each worker's time went, over the whole run."""
    overhead = np.nansum(run.overhead, axis=0)
    compute = np.nansum(run.compute, axis=0) - overhead
    wait = np.nansum(run.wait, axis=0)
    whole = max(float(run.seconds.sum()), float((overhead + compute + wait).max(initial=0.0))) or 1.0
    bars = []
    for i in chosen(run, BARS):
        parts = [("over", overhead[i] / whole), ("c0", compute[i] / whole), ("idle", wait[i] / whole)]
        bars.append((f"worker {i}", parts, f"waits {percent(wait[i] / whole)}"))
    some = "" if run.workers <= BARS else f" ({BARS} of the {run.workers:,} workers, by speed)"
    return draw.figure(
        "Where the time went",
        f"Each worker's seconds over the whole run{some}.",
        draw.bars(bars),
        draw.legend([("c0", "computing"), *overhead_entry(run), ("idle", "waiting")]),
    )


def _per_worker(
    run: Run, values: Array, title: str, says: str, text: Callable[[float], str], stacked: bool
) -> str:
    if run.workers > BANDS:
        rows = chosen(run, ROWS)
        means = thin(values[:, rows], 200)
        labels = [str(i) for i in rows]
        some = "" if run.workers <= ROWS else f" ({ROWS} of {run.workers:,} workers, by speed)"
        content = draw.heat(
            labels, _edges(run, means), means.mean, _round_ticks(run), _count, text, _tips(run, means)
        )
        return draw.figure(title, f"{says}, one row a worker{some}.", content)
    means = thin(values)
    legend = draw.legend([(f"c{i}", name) for i, name in enumerate(names(run))])
    if stacked:
        content = draw.areas(
            names(run), _edges(run, means), means.mean, _round_ticks(run), _count, text, _tips(run, means)
        )
        return draw.figure(title, f"{says}, on top of one another.", content, legend)
    x = _middles(run, means)
    series = [draw.Line(name, f"c{i}", x, means.mean[:, i]) for i, name in enumerate(names(run))]
    tip = _round_tip(run, means)
    content = draw.lines(series, _rounds(run), top(means.mean), _round_ticks(run), _count, text, tip)
    return draw.figure(title, f"{says}.", content, legend)


def _pace(ratio: float) -> str:
    return f" · {times(ratio)}" if ratio == ratio else ""


def _count(value: float) -> str:
    return f"{value:,.0f}"


def _edges(run: Run, buckets: Thin) -> Array:
    """The buckets' edges as round numbers."""
    return np.append(run.round, run.round[-1] + 1).astype(float)[buckets.edges]


def _middles(run: Run, buckets: Thin) -> Array:
    edges = _edges(run, buckets)
    return (edges[:-1] + edges[1:]) / 2


def _rounds(run: Run) -> tuple[float, float]:
    return float(run.round[0]), float(run.round[-1]) + 1


def _round_ticks(run: Run) -> list[float]:
    return ticks(float(run.round[-1]) + 1, 5, whole=True)


def _tips(run: Run, buckets: Thin) -> list[str]:
    edges = _edges(run, buckets).astype(int).tolist()
    return [
        f"Round {first:,}" if end - first == 1 else f"Rounds {first:,} to {end - 1:,}"
        for first, end in pairwise(edges)
    ]


def _round_tip(run: Run, buckets: Thin) -> Callable[[float], str]:
    edges, tips = _edges(run, buckets), _tips(run, buckets)
    return lambda x: tips[min(max(int(np.searchsorted(edges, x, side="right")) - 1, 0), len(tips) - 1)]
