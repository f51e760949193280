"""The report that a person opens after a run: findings in words, then pictures; one that compares several; and the
page around all of these, one HTML file that asks for nothing else.
"""

from __future__ import annotations

import base64
import hashlib
import os
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import Any

import paceline
from paceline.errors import PacelineError
from paceline.files import write_whole
from paceline.runs import charts, draw
from paceline.runs.columns import BANDS, Columns
from paceline.runs.draw import escape
from paceline.runs.findings import compare, differences, findings, labels
from paceline.runs.run import Run
from paceline.runs.summary import final_loss, summarize
from paceline.runs.words import number, percent, plural, seconds


def page(title: str, head: str, body: str, script: str = "") -> str:
    """A whole document: style and scripts are in it, light or dark as the reader's system or choice has it.

    script: another one, after the page's own.
    """
    here = resources.files("paceline.runs")
    style = here.joinpath("page.css").read_text(encoding="utf-8")
    scripts = "\n".join(f"<script>{text}</script>" for text in _scripts(script))
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy(script)}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f'<link rel="icon" href="{_ICON}">\n'
        f"<title>{escape(title)}</title>\n<style>\n{style}</style>\n</head>\n<body>\n{_WAITING}\n<main>\n"
        f"<header>{head}</header>\n{body}\n"
        f"<footer>Paceline {escape(paceline.__version__)}</footer>\n</main>\n{scripts}\n"
        "</body>\n</html>\n"
    )


def policy(script: str = "") -> str:
    """The content security policy of such a page: its own scripts alone run, and nothing is loaded.

    script: the second one, which may ask its own server.
    """
    digests = (hashlib.sha256(text.encode()).digest() for text in _scripts(script))
    allowed = " ".join(f"'sha256-{base64.b64encode(digest).decode()}'" for digest in digests)
    server = "'self'" if script else "'none'"
    return (
        f"default-src 'none'; script-src {allowed}; style-src 'unsafe-inline'; img-src data:; "
        f"connect-src {server}; base-uri 'none'; form-action 'none'"
    )


def _scripts(script: str) -> list[str]:
    here = resources.files("paceline.runs")
    own = "".join(here.joinpath(name).read_text(encoding="utf-8") for name in ("page.js", "copy.js"))
    return [f"\n{text}" for text in (own, script) if text]


# Waiting is hatched alike in all pictures; the bars of a list have it in page.css.
_WAITING = (
    '<svg class="patterns" width="0" height="0" aria-hidden="true"><defs><pattern id="waiting" width="5.5" '
    'height="5.5" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">'
    '<path class="ground" d="M0 0h5.5v5.5H0z"/><path class="hatch" d="M4 0h1.5v5.5H4z"/></pattern></defs></svg>'
)


# Four bars that end together.
_BARS = (
    b'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 32 32"><path fill="#0072b2" d="M0 0h32v32H0z"/>'
    b'<path fill="#fff" d="M4 4h24v3H4zM12 11h16v3H12zM8 18h20v3H8zM18 25h10v3H18z"/></svg>'
)
_ICON = "data:image/svg+xml;base64," + base64.b64encode(_BARS).decode()


def header(title: str, under: str, state: str = "") -> str:
    """The page's opening: what it is, in a line, and what of. state: HTML, how the run is doing."""
    theme = '<button type="button" class="theme" aria-label="Light or dark" title="Light or dark">◐</button>'
    return (
        f'<div class="top"><p class="brand">paceline</p>{state}{theme}</div>'
        f'<h1>{escape(title)}</h1><p class="about">{escape(under)}</p>'
    )


Card = tuple[str, str, str, float | None]  # value, unit, what it is, and a share to show as a bar


def cards(entries: Sequence[Card]) -> str:
    """Figures at a glance; shares are from 0 to 1."""
    items = []
    for value, unit, name, share in entries:
        width = f"{100 * min(max(share or 0, 0), 1):.1f}%"
        bar = "" if share is None else f'<div class="share"><i style="width:{width}"></i></div>'
        figure = f"<b>{escape(value)} <small>{escape(unit)}</small></b>"
        items.append(f"<div>{figure}{bar}<span>{escape(name)}</span></div>")
    return f'<div class="cards">{"".join(items)}</div>'


def points(sentences: Sequence[str]) -> str:
    """Findings, one a line."""
    return f'<ul class="findings">{"".join(f"<li>{escape(text)}</li>" for text in sentences)}</ul>'


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
    reach = f": {percent(share)} of their combined speed" if share is not None else ""
    body = cards(_cards(summary, final_loss(run))) + points(findings(run)) + _pictures(Columns.of(run))
    told = about_config(run.config, plural(len(run.round), "round"))
    return page(f"{title} · Paceline", header(title + reach, told), body)


def _cards(summary: dict[str, Any], final: float | None) -> list[Card]:
    bound, share = number(summary["bound_samples_per_second"]), summary["share_of_bound"]
    entries: list[Card] = [
        (number(summary["samples_per_second"]), "samples/s", f"of {bound} possible", None),
        (percent(share), "", "of the workers' combined speed", share),
        (percent(summary["idle_share"]), "", "of the workers' time spent waiting", summary["idle_share"]),
        (seconds(summary["seconds"]), "", f"for {summary['samples']:,} samples", None),
    ]
    if summary["train_loss"] is not None:
        label = f"training loss, mean of the last epoch; {number(final)} in the last round"
        entries.append((number(summary["train_loss"]), "", label, None))
    if summary.get("test_accuracy") is not None:
        entries.append((percent(summary["test_accuracy"], 1), "", "test accuracy", None))
    return entries


def _pictures(columns: Columns) -> str:
    """Every chart of one run, on a page."""
    return f'<div class="charts">{"".join(figures(columns))}</div>'


def figures(columns: Columns, start: int = 0, end: int | None = None, recent: int | None = None) -> list[str]:
    """Every chart of one run, or of a stretch of it. recent: judge who is slow by this many of the last rounds."""
    window = columns.window(start, end, recent)
    found = [
        charts.round_seconds(window),
        charts.loads(window),
        charts.pace(window),
        *charts.gates(window),
        charts.timeline(columns, window.start, window.end),
        charts.losses([("loss", window)]),
        charts.stragglers(window),
        charts.time_spent(window),
    ]
    return [figure for figure in found if figure]


def _check(run: Run) -> None:
    """Raise PacelineError for a run that has no round yet."""
    if not len(run.round):
        raise PacelineError(f"{run.path} holds no round yet; expected at least one to report on")


def about_config(config: dict[str, Any], rounds: str = "") -> str:
    """What was run, in a line, from run.json."""
    parts = [
        f"job {config['job']}" if "job" in config else "",
        f"{config['model']} on {config['data']}" if "model" in config and "data" in config else "",
        f"global batch {config['global_batch']}" if "global_batch" in config else "",
        rounds,
        str(config.get("engine", "")),
        str(config.get("started", "")).replace("T", " ").replace("+00:00", " UTC"),
    ]
    return " · ".join(part for part in parts if part)


def render_comparison(runs: Sequence[Run]) -> str:
    """Several runs on one page."""
    for run in runs:
        _check(run)
    named = list(zip(labels(runs), runs, strict=True))
    columns = [(name, Columns.of(run)) for name, run in named]
    windows = [(name, each.window()) for name, each in columns]
    said = compare(runs)
    pictures = _rates(named) + charts.losses(windows) + charts.rounds(windows) + _side_by_side(columns)
    figures = f'<h2>Figures</h2><div class="card">{draw.table(HEADS, side_by_side(runs))}</div>'
    body = f'{points(said[1:])}<div class="charts">{pictures}</div>{figures}'
    for (name, run), (_, each) in zip(named, columns, strict=True):
        body += f"<details><summary>{draw.escape(name)}: findings and pictures</summary>"
        body += points(findings(run)) + _pictures(each) + "</details>"
    told = "" if differences(runs) else about_config(runs[0].config, plural(len(runs[0].round), "round"))
    return page("Comparison · Paceline", header(said[0], told), body)


def _rates(named: list[tuple[str, Run]]) -> str:
    """Samples per second as a part of what each run's workers could do."""
    rows, figures, summaries = [], [], [summarize(run) for _, run in named]
    both = [(s["samples_per_second"], s["bound_samples_per_second"]) for s in summaries]
    most = max(rate or 0.0 for pair in both for rate in pair) or 1.0
    for i, ((name, _), (real, possible), summary) in enumerate(zip(named, both, summaries, strict=True)):
        rate, bound, share = real or 0.0, possible or 0.0, summary["share_of_bound"]
        parts = [(f"c{i % BANDS}", rate / most), ("rest", max(bound - rate, 0.0) / most)]
        rows.append((name, parts, f"{number(rate)} · {percent(share)}"))
        figures.append((name, number(real), number(possible), percent(share, 1)))
    return draw.figure(
        "Samples per second",
        "In colour: the samples per second of the run. Grey: up to the combined speed of the same workers.",
        draw.bars(rows),
        table=draw.table(("run", "samples/s", "possible", "share of it"), figures),
    )


def _side_by_side(named: list[tuple[str, Columns]]) -> str:
    """The last rounds of every run on one scale of time."""
    shown = min(charts.SHOWN, *(len(columns) for _, columns in named))
    parts = [(name, columns, len(columns) - shown, len(columns)) for name, columns in named]
    says = "One scale of time for all: the shorter, the faster."
    return charts.strips(f"The last {plural(shown, 'round')} of each", says, parts, "run")


HEADS = ("run", "samples/s", "of bound", "waiting", "time", "mean loss", "accuracy", "loads")


def side_by_side(runs: Sequence[Run]) -> list[tuple[str, ...]]:
    """The figures of several runs in words, a row for each, for the columns ``HEADS``."""
    rows: list[tuple[str, ...]] = []
    for name, s in zip(labels(runs), map(summarize, runs), strict=True):
        loads = s["final_batches"]
        split = "/".join(map(str, loads)) if len(loads) <= BANDS else f"{min(loads)} to {max(loads)}"
        speed = number(s["samples_per_second"]), percent(s["share_of_bound"], 1), percent(s["idle_share"], 1)
        learnt = number(s["train_loss"]), percent(s.get("test_accuracy"), 1)
        rows.append((name, *speed, seconds(s["seconds"]), *learnt, split))
    return rows
