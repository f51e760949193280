"""Several runs on one page: what the policies made of the same workers."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from paceline.runs import charts, draw, timeline
from paceline.runs.alike import differences, labels
from paceline.runs.axes import round_axis, time_axis, top
from paceline.runs.columns import BANDS, Columns, Window
from paceline.runs.findings import compare, findings
from paceline.runs.page import header, page, points
from paceline.runs.run import Run
from paceline.runs.sections import about, check, details, pictures
from paceline.runs.summary import summarize
from paceline.runs.words import listing, number, percent, plural, seconds


def render(runs: Sequence[Run]) -> str:
    """Several runs on one page."""
    for run in runs:
        check(run)
    named = list(zip(labels(runs), runs, strict=True))
    columns = [(name, Columns.of(run)) for name, run in named]
    windows = [(name, each.window()) for name, each in columns]
    said = compare(runs)
    body = (
        points(said[1:]) + '<div class="charts">' + _rates(named) + charts.losses(windows) + _rounds(windows)
    )
    body += _side_by_side(columns) + "</div><h2>Figures</h2>" + _figures(named)
    for (name, run), (_, each) in zip(named, columns, strict=True):
        body += f"<details><summary>{draw.escape(name)}: findings and pictures</summary>"
        body += points(findings(run)) + pictures(each) + details(run, summarize(run)) + "</details>"
    return page("Comparison · Paceline", header(said[0], "" if differences(runs) else about(runs[0])), body)


def _rates(named: list[tuple[str, Run]]) -> str:
    """Samples per second as a part of what each run's workers could do."""
    rows, summaries = [], [summarize(run) for _, run in named]
    most = (
        max(max(s["bound_samples_per_second"] or 0, s["samples_per_second"] or 0) for s in summaries) or 1.0
    )
    for i, ((name, _), summary) in enumerate(zip(named, summaries, strict=True)):
        rate, bound = summary["samples_per_second"] or 0.0, summary["bound_samples_per_second"] or 0.0
        parts = [(f"c{i % BANDS}", rate / most), ("rest", max(bound - rate, 0.0) / most)]
        rows.append((name, parts, f"{number(rate)} · {percent(summary['share_of_bound'])}"))
    return draw.figure(
        "Samples per second",
        "In colour: the samples per second of the run. Grey: up to the combined speed of the same workers.",
        draw.bars(rows),
        table=draw.table(
            ("run", "samples/s", "possible", "share of it"),
            [
                (
                    name,
                    number(s["samples_per_second"]),
                    number(s["bound_samples_per_second"]),
                    percent(s["share_of_bound"], 1),
                )
                for (name, _), s in zip(named, summaries, strict=True)
            ],
        ),
    )


def _rounds(named: list[tuple[str, Window]]) -> str:
    series = []
    for i, (name, run) in enumerate(named):
        known = ~np.isnan(run.seconds.mean)
        x = (run.edges[:-1] + run.edges[1:]) / 2
        series.append(draw.Line(name, f"c{i % BANDS}", x[known], run.seconds.mean[known]))
    first = min(run.span[0] for _, run in named)
    end = max(run.span[1] for _, run in named)
    y_axis = time_axis("time of a round", top(*(run.lengths for _, run in named)))
    short = any(run.short for _, run in named)
    return draw.figure(
        "Time per round",
        f"Seconds of each round{'; rounds of fewer samples are left out' if short else ''}.",
        draw.lines(series, round_axis((first, end)), y_axis, seconds, lambda x: f"Round {int(x):,}"),
        draw.legend([(line.colour, line.name) for line in series]),
        table=_rounds_table(series, first, end),
    )


def _rounds_table(series: Sequence[draw.Line], first: float, end: float) -> str:
    """A dozen places, and what each curve has nearest to them; nothing behind its end."""
    rows = []
    for place in np.unique(np.linspace(first, end - 1, 12).astype(int)):
        near = [int(np.abs(line.x - place - 0.5).argmin()) for line in series]
        cells = (
            seconds(float(line.y[i])) if place <= line.x[-1] else "–"
            for line, i in zip(series, near, strict=True)
        )
        rows.append((f"{place:,}", *cells))
    return draw.table(("round", *(line.name for line in series)), rows)


def _side_by_side(named: list[tuple[str, Columns]]) -> str:
    """The last rounds of every run on one scale of time."""
    shown = min(timeline.SHOWN, *(len(columns) for _, columns in named))
    lengths = [float(columns["seconds"][-shown:].sum()) for _, columns in named]
    strips = [
        f"<div><h4>{draw.escape(name)}: {seconds(length)}</h4>"
        f"{timeline.strip(columns, len(columns) - shown, len(columns), max(lengths))}</div>"
        for (name, columns), length in zip(named, lengths, strict=True)
    ]
    return draw.figure(
        f"The last {plural(shown, 'round')} of each",
        "One scale of time for all: the shorter, the faster.",
        f'<div class="strips">{"".join(strips)}</div>',
        timeline.legend(
            any(columns.sums(len(columns) - shown, len(columns))[2].sum() > 0 for _, columns in named)
        ),
        wide=True,
        table=timeline.table(
            [(name, columns, len(columns) - shown, len(columns)) for name, columns in named], "run"
        ),
    )


def _figures(named: list[tuple[str, Run]]) -> str:
    head = [
        "run",
        "samples/s",
        "of the bound",
        "waiting",
        "seconds",
        "rounds",
        "loss, mean of the last epoch",
        "accuracy",
        "loads",
    ]
    rows = []
    for name, run in named:
        s = summarize(run)
        final = s["final_batches"]
        rows.append(
            [
                name,
                number(s["samples_per_second"]),
                percent(s["share_of_bound"], 1),
                percent(s["idle_share"], 1),
                number(s["seconds"]),
                f"{s['steps']:,}",
                number(s["train_loss"]),
                percent(s.get("test_accuracy"), 1),
                listing(final) if len(final) <= BANDS else f"{min(final)} to {max(final)}",
            ]
        )
    return f'<div class="card">{draw.table(head, rows)}</div>'
