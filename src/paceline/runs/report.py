"""The report that a person opens after a run: findings in words, then pictures; and several runs compared."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from paceline.errors import PacelineError
from paceline.files import write_whole
from paceline.runs import charts, draw
from paceline.runs.axes import thin, ticks, top
from paceline.runs.findings import compare, findings
from paceline.runs.page import cards, header, page, points
from paceline.runs.run import Run
from paceline.runs.summary import summarize
from paceline.runs.words import listing, number, percent, plural, seconds

REPORT = "report.html"


def write(run: Run, path: str | os.PathLike[str] | None = None) -> Path:
    """Write one run's report, into its directory unless ``path`` says where; the file's path.

    Raises PacelineError for a run without a round.
    """
    return write_whole(Path(path) if path is not None else run.path / REPORT, render(run))


def write_comparison(runs: Sequence[Run], path: str | os.PathLike[str]) -> Path:
    """Write one page that compares runs; the file's path."""
    return write_whole(path, render_comparison(runs))


def render(run: Run) -> str:
    """One run's report as HTML."""
    _check(run)
    summary = summarize(run)
    title = f"{run.policy} on {plural(run.workers, 'worker')}"
    share = summary["share_of_bound"]
    reach = f": {percent(share)} of what they can do together" if share is not None else ""
    body = cards(_cards(summary)) + points(findings(run)) + pictures(run) + details(run, summary)
    return page(f"{title} · Paceline", header(title + reach, _what(run)), body)


def render_comparison(runs: Sequence[Run]) -> str:
    """Several runs on one page."""
    for run in runs:
        _check(run)
    named = list(zip(labels(runs), runs, strict=True))
    said = compare(runs)
    body = points(said[1:]) + '<div class="charts">' + _rates(named) + charts.losses(named) + _rounds(named)
    body += _side_by_side(named) + "</div><h2>Figures</h2>" + _figures(named)
    for name, run in named:
        body += f"<details><summary>{draw.escape(name)}: findings and pictures</summary>"
        body += points(findings(run)) + pictures(run) + details(run, summarize(run)) + "</details>"
    return page("Comparison · Paceline", header(said[0], _what(runs[0])), body)


def labels(runs: Sequence[Run]) -> list[str]:
    """What to call each run: its policy, and its directory where two share one."""
    policies = [run.policy for run in runs]
    return [
        policy if policies.count(policy) == 1 else f"{policy} ({run.path.name})"
        for policy, run in zip(policies, runs, strict=True)
    ]


def pictures(run: Run) -> str:
    """Every chart of one run."""
    figures = [
        charts.round_seconds(run),
        charts.loads(run),
        charts.losses([("loss", run)]),
        charts.timeline(run),
        charts.stragglers(run),
        charts.time_spent(run),
        charts.pace(run),
    ]
    return f'<div class="charts">{"".join(figures)}</div>'


def details(run: Run, summary: dict[str, Any]) -> str:
    """The summary and the configuration as tables."""
    rows = [(key.replace("_", " "), _cell(value)) for key, value in summary.items()]
    config = [(key.replace("_", " "), _cell(value)) for key, value in run.config.items() if key != "resumed"]
    return (
        f'<div class="charts">{draw.figure("Summary", "As in summary.json.", draw.table((), rows))}'
        f"{draw.figure('Configuration', 'As in run.json.', draw.table((), config))}</div>"
    )


def _check(run: Run) -> None:
    if not len(run.round):
        raise PacelineError(f"{run.path} holds no round yet; expected at least one to report on")


def _what(run: Run) -> str:
    config = run.config
    parts = [
        f"{config['model']} on {config['data']}" if "model" in config and "data" in config else "",
        f"global batch {config['global_batch']}" if "global_batch" in config else "",
        plural(len(run.round), "round"),
        str(config.get("engine", "")),
        str(config.get("started", "")).replace("T", " ").replace("+00:00", " UTC"),
    ]
    return " · ".join(part for part in parts if part)


def _cards(summary: dict[str, Any]) -> list[tuple[str, str, str, float | None]]:
    bound = number(summary["bound_samples_per_second"])
    entries: list[tuple[str, str, str, float | None]] = [
        (number(summary["samples_per_second"]), "samples/s", f"of {bound} possible", None),
        (
            percent(summary["share_of_bound"]),
            "",
            "of the workers' speeds together",
            summary["share_of_bound"],
        ),
        (percent(summary["idle_share"]), "", "of the workers' time spent waiting", summary["idle_share"]),
        (seconds(summary["seconds"]), "", f"for {summary['samples']:,} samples", None),
    ]
    if summary["train_loss"] is not None:
        entries.append((number(summary["train_loss"]), "", "training loss at the end", None))
    if summary.get("test_accuracy") is not None:
        entries.append((percent(summary["test_accuracy"], 1), "", "test accuracy", None))
    return entries


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, list) and all(isinstance(item, str) for item in value):
        return " ".join(value)
    if isinstance(value, list | dict):
        text = json.dumps(value)
        return text if len(text) < 300 else f"{text[:300]} ..."
    return "–" if value is None else str(value)


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
    shown = min(charts.SHOWN, *(len(run.round) for _, run in named))
    span = max(float(run.seconds[-shown:].sum()) for _, run in named)
    strips = [
        f"<div><h4>{draw.escape(name)}: {seconds(float(run.seconds[-shown:].sum()))}</h4>"
        f"{charts.strip(run, len(run.round) - shown, shown, span)}</div>"
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
