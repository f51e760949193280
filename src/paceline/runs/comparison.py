"""Several runs on one page: what the policies made of the same workers."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.runs import charts, draw, timeline
from paceline.runs.alike import differences, labels
from paceline.runs.axes import ticks, top
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
        parts = [(f"c{i % BANDS}", rate / most), ("idle", max(bound - rate, 0.0) / most)]
        rows.append((name, parts, f"{number(rate)} · {percent(summary['share_of_bound'])}"))
    return draw.figure(
        "Samples per second",
        "Solid: the samples per second of the run. Hatched: up to the combined speed of the same workers.",
        draw.bars(rows),
    )


def _rounds(named: list[tuple[str, Window]]) -> str:
    series = [
        draw.Line(name, f"c{i % BANDS}", (run.edges[:-1] + run.edges[1:]) / 2, run.seconds.mean)
        for i, (name, run) in enumerate(named)
    ]
    first = min(run.span[0] for _, run in named)
    end = max(run.span[1] for _, run in named)
    high = top(*(line.y for line in series))
    content = draw.lines(
        series, (first, end), high, ticks(end, 5, whole=True, low=first), lambda x: f"{x:,.0f}", seconds,
        lambda x: f"Round {int(x):,}",
    )  # fmt: skip
    return draw.figure(
        "Time per round",
        "Seconds of each round.",
        content,
        draw.legend([(line.colour, line.name) for line in series]),
    )


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
        draw.legend([("c0", "computing"), ("bad", "the straggler"), ("idle plain", "waiting")]),
        wide=True,
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
