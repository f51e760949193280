"""Several runs on one page: what the policies made of the same workers."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.runs import charts, draw, timeline
from paceline.runs.axes import thin, ticks, top
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
    said = compare(runs)
    body = points(said[1:]) + '<div class="charts">' + _rates(named) + charts.losses(named) + _rounds(named)
    body += _side_by_side(named) + "</div><h2>Figures</h2>" + _figures(named)
    for name, run in named:
        body += f"<details><summary>{draw.escape(name)}: findings and pictures</summary>"
        body += points(findings(run)) + pictures(run) + details(run, summarize(run)) + "</details>"
    return page("Comparison · Paceline", header(said[0], about(runs[0])), body)


def labels(runs: Sequence[Run]) -> list[str]:
    """What to call each run: its policy, and its directory where two share one."""
    policies = [run.policy for run in runs]
    return [
        policy if policies.count(policy) == 1 else f"{policy} ({run.path.name})"
        for policy, run in zip(policies, runs, strict=True)
    ]


def _rates(named: list[tuple[str, Run]]) -> str:
    """Samples per second as a part of what each run's workers could do."""
    rows, summaries = [], [summarize(run) for _, run in named]
    most = (
        max(max(s["bound_samples_per_second"] or 0, s["samples_per_second"] or 0) for s in summaries) or 1.0
    )
    for i, ((name, _), summary) in enumerate(zip(named, summaries, strict=True)):
        rate, bound = summary["samples_per_second"] or 0.0, summary["bound_samples_per_second"] or 0.0
        parts = [(f"c{i % charts.BANDS}", rate / most), ("idle", max(bound - rate, 0.0) / most)]
        rows.append((name, parts, f"{number(rate)} · {percent(summary['share_of_bound'])}"))
    return draw.figure(
        "Samples per second",
        "Coloured: what went through. Grey: what the same workers could do together.",
        draw.bars(rows),
    )


def _rounds(named: list[tuple[str, Run]]) -> str:
    series = []
    for i, (name, run) in enumerate(named):
        means = thin(run.seconds)
        middles = run.round[0] + (means.edges[:-1] + means.edges[1:]) / 2
        series.append(draw.Line(name, f"c{i % charts.BANDS}", middles, means.mean))
    first, end = (pick(float(run.round[at]) for _, run in named) for pick, at in ((min, 0), (max, -1)))
    high = top(*(line.y for line in series))
    content = draw.lines(
        series, (first, end + 1), high, ticks(end + 1, 5, whole=True), lambda x: f"{x:,.0f}", seconds,
        lambda x: f"Round {int(x):,}",
    )  # fmt: skip
    return draw.figure(
        "Time per round",
        "Seconds of each round.",
        content,
        draw.legend([(line.colour, line.name) for line in series]),
    )


def _side_by_side(named: list[tuple[str, Run]]) -> str:
    """The last rounds of every run on one scale of time."""
    shown = min(timeline.SHOWN, *(len(run.round) for _, run in named))
    span = max(float(run.seconds[-shown:].sum()) for _, run in named)
    strips = [
        f"<div><h4>{draw.escape(name)}: {seconds(float(run.seconds[-shown:].sum()))}</h4>"
        f"{timeline.strip(run, len(run.round) - shown, shown, span)}</div>"
        for name, run in named
    ]
    return draw.figure(
        f"The last {plural(shown, 'round')} of each",
        "One scale of time for all: the shorter, the faster.",
        f'<div class="strips">{"".join(strips)}</div>',
        draw.legend([("c0", "computing"), ("bad", "the straggler"), ("idle", "waiting")]),
        wide=True,
    )


def _figures(named: list[tuple[str, Run]]) -> str:
    head = ["run", "samples/s", "of the bound", "waiting", "seconds", "rounds", "loss", "accuracy", "loads"]
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
                listing(final) if len(final) <= charts.BANDS else f"{min(final)} to {max(final)}",
            ]
        )
    return f'<div class="card">{draw.table(head, rows)}</div>'
