"""What the page of one run and the page that compares several have in common."""

from __future__ import annotations

import json
from typing import Any

from paceline.errors import PacelineError
from paceline.runs import charts, draw, timeline
from paceline.runs.columns import Columns
from paceline.runs.run import Run
from paceline.runs.words import plural


def pictures(columns: Columns) -> str:
    """Every chart of one run, on a page."""
    return f'<div class="charts">{"".join(figures(columns))}</div>'


def figures(columns: Columns, start: int = 0, end: int | None = None, recent: int | None = None) -> list[str]:
    """Every chart of one run, or of a stretch of it. recent: judge who is slow by the last so many rounds."""
    window = columns.window(start, end, recent)
    found = [
        charts.round_seconds(window),
        charts.loads(window),
        charts.pace(window),
        *charts.gates(window),
        timeline.timeline(columns, window.start, window.end),
        charts.losses([("loss", window)]),
        charts.stragglers(window),
        charts.time_spent(window),
    ]
    return [figure for figure in found if figure]


def details(run: Run, summary: dict[str, Any]) -> str:
    """The summary and the configuration as tables."""
    rows = [(key.replace("_", " "), _cell(value)) for key, value in summary.items()]
    config = [(key.replace("_", " "), _cell(value)) for key, value in run.config.items() if key != "resumed"]
    return (
        f'<div class="charts tables">{draw.figure("Summary", "As in summary.json.", draw.table((), rows))}'
        f"{draw.figure('Configuration', 'As in run.json.', draw.table((), config))}</div>"
    )


def check(run: Run) -> None:
    """Raise PacelineError for a run that has no round yet."""
    if not len(run.round):
        raise PacelineError(f"{run.path} holds no round yet; expected at least one to report on")


def about(run: Run) -> str:
    """What was run, in a line."""
    return about_config(run.config, plural(len(run.round), "round"))


def about_config(config: dict[str, Any], rounds: str = "") -> str:
    """The same from run.json."""
    parts = [
        f"job {config['job']}" if "job" in config else "",
        f"{config['model']} on {config['data']}" if "model" in config and "data" in config else "",
        f"global batch {config['global_batch']}" if "global_batch" in config else "",
        rounds,
        str(config.get("engine", "")),
        str(config.get("started", "")).replace("T", " ").replace("+00:00", " UTC"),
    ]
    return " · ".join(part for part in parts if part)


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, list) and all(isinstance(item, str) for item in value):
        return " ".join(value)
    if isinstance(value, list | dict):
        text = json.dumps(value)
        return text if len(text) < 300 else f"{text[:300]} ..."
    return "–" if value is None else str(value)
