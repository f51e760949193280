"""The report that a person opens after a run: findings in words, then pictures; and one that compares several."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from paceline.files import write_whole
from paceline.runs import comparison
from paceline.runs.columns import Columns
from paceline.runs.findings import findings
from paceline.runs.page import cards, header, page, points
from paceline.runs.run import Run
from paceline.runs.sections import about, check, details, pictures
from paceline.runs.summary import final_loss, summarize
from paceline.runs.words import number, percent, plural, seconds

REPORT = "report.html"


def write(run: Run, path: str | os.PathLike[str] | None = None) -> Path:
    """Write one run's report, into its directory unless ``path`` says where; the file's path.

    Raises PacelineError for a run without a round.
    """
    return write_whole(Path(path) if path is not None else run.path / REPORT, render(run))


def write_comparison(runs: Sequence[Run], path: str | os.PathLike[str]) -> Path:
    """Write one page that compares runs; the file's path."""
    return write_whole(path, comparison.render(runs))


def render(run: Run) -> str:
    """One run's report as HTML."""
    check(run)
    summary = summarize(run)
    title = f"{run.policy} on {plural(run.workers, 'worker')}"
    share = summary["share_of_bound"]
    reach = f": {percent(share)} of their combined speed" if share is not None else ""
    body = (
        cards(_cards(summary, final_loss(run)))
        + points(findings(run))
        + pictures(Columns.of(run))
        + details(run, summary)
    )
    return page(f"{title} · Paceline", header(title + reach, about(run)), body)


def _cards(summary: dict[str, Any], final: float | None) -> list[tuple[str, str, str, float | None]]:
    bound = number(summary["bound_samples_per_second"])
    entries: list[tuple[str, str, str, float | None]] = [
        (number(summary["samples_per_second"]), "samples/s", f"of {bound} possible", None),
        (
            percent(summary["share_of_bound"]),
            "",
            "of the workers' combined speed",
            summary["share_of_bound"],
        ),
        (percent(summary["idle_share"]), "", "of the workers' time spent waiting", summary["idle_share"]),
        (seconds(summary["seconds"]), "", f"for {summary['samples']:,} samples", None),
    ]
    if summary["train_loss"] is not None:
        label = f"training loss, mean of the last epoch; {number(final)} in the last round"
        entries.append((number(summary["train_loss"]), "", label, None))
    if summary.get("test_accuracy") is not None:
        entries.append((percent(summary["test_accuracy"], 1), "", "test accuracy", None))
    return entries
