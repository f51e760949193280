"""``paceline report RUN [RUN...]``: rebuild a run's report and trace, or compare several runs."""

from __future__ import annotations

import os
from pathlib import Path

from rich.console import Console
from rich.table import Table
from typer import Argument, Option

from paceline import tables
from paceline.cli.options import Json
from paceline.cli.output import check_json, write_json
from paceline.errors import PacelineError
from paceline.files import check_place, write_whole
from paceline.runs import Run, read, report, sinks, summarize, trace
from paceline.runs.findings import compare, findings
from paceline.runs.words import percent


def command(
    runs: list[Path] = Argument(..., help="Run directories, as --out of a run named them.", metavar="RUN"),
    out: Path | None = Option(
        None,
        help="The page's file. Default: report.html in the run; compare.html beside several runs.",
        metavar="FILE",
    ),
    to: list[str] | None = Option(
        None,
        help="Also send the rounds to wandb, mlflow, trackio or tensorboard: NAME or NAME:key=value,...",
        metavar="SINK",
    ),
    json_: Json = None,
) -> None:
    """Say what happened in a run, and rebuild its report.html and trace.json; several runs are compared."""
    # Check all paths, runs and sinks before anything is written.
    check_json(json_)
    if out is not None:
        check_place(out)
    records = [read(path) for path in runs]
    pages = [report.render(run) for run in records]
    opened = sinks.opened(records, to or [])
    summaries = [summarize(run) for run in records]
    console = Console(stderr=json_ == "-")
    if len(records) == 1:
        page = write_whole(out or records[0].path / report.REPORT, pages[0])
        for sentence in findings(records[0]):
            tables.say(console, sentence)
    else:
        page = report.write_comparison(records, out or _beside(runs))
        for run, content in zip(records, pages, strict=True):
            write_whole(run.path / report.REPORT, content)
        tables.print_whole(console, comparison_table(records))
        tables.say(console, compare(records)[0])
        trace.write_comparison(records, page.parent / trace.TRACE)
    for run in records:
        trace.write(run)
    console.print(f"Report: {page}", soft_wrap=True, highlight=False)
    for run, sink in opened:
        console.print(f"Sent to {sinks.send(run, sink)}", soft_wrap=True, highlight=False, markup=False)
    write_json(json_, summaries[0] if len(summaries) == 1 else summaries, indent=2)


def comparison_table(runs: list[Run]) -> Table:
    """The figures of several runs side by side, for a terminal; the page has more of them."""
    rows = [dict(zip(report.HEADS, row, strict=True)) for row in report.side_by_side(runs, listed=4)]
    learnt = "mean loss" if all(row["accuracy"] == percent(None) for row in rows) else "accuracy"
    heads = ("run", "of bound", "waiting", "time", learnt, "loads")
    table = tables.begun(*heads)
    for row in rows:
        table.add_row(*(row[head] for head in heads))
    return table


def _beside(runs: list[Path]) -> Path:
    """The path of compare.html, in the directory that holds all the runs."""
    parents = [os.path.abspath(path.parent if path.name else path.resolve().parent) for path in runs]
    try:
        return Path(os.path.commonpath(parents)) / "compare.html"
    except ValueError as error:  # on different drives
        raise PacelineError("the runs lie on different drives; name the page's file with --out") from error
