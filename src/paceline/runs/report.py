"""The report of a run (findings in words, then charts), the comparison of several runs, and the page around them: one
HTML file that loads nothing else.
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


def page(title: str, head: str, body: str, script: str = "", form: bool = False) -> str:
    """A whole HTML document with its style and scripts, light or dark by the reader's system or choice.

    script: a further script, after the page's own. form: the page may send a form to its own server.
    """
    here = resources.files("paceline.runs")
    style = here.joinpath("page.css").read_text(encoding="utf-8")
    scripts = "\n".join(f"<script>{text}</script>" for text in _scripts(script))
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy(script, form)}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f'<link rel="icon" href="{_ICON}">\n'
        f"<title>{escape(title)}</title>\n<style>\n{style}</style>\n</head>\n<body>\n{_WAITING}\n<main>\n"
        f"<header>{head}</header>\n{body}\n"
        f"<footer>Paceline {escape(paceline.__version__)}</footer>\n</main>\n{scripts}\n"
        "</body>\n</html>\n"
    )


def policy(script: str = "", form: bool = False) -> str:
    """The content security policy of a page: only its own scripts run, and nothing is loaded.

    script: the further script; with one, the page may send requests to its own server. form: as for ``page``.
    """
    digests = (hashlib.sha256(text.encode()).digest() for text in _scripts(script))
    allowed = " ".join(f"'sha256-{base64.b64encode(digest).decode()}'" for digest in digests)
    server, forms = ("'self'" if each else "'none'" for each in (script, form))
    return (
        f"default-src 'none'; script-src {allowed}; style-src 'unsafe-inline'; img-src data:; "
        f"connect-src {server}; base-uri 'none'; form-action {forms}"
    )


def _scripts(script: str) -> list[str]:
    here = resources.files("paceline.runs")
    own = "".join(here.joinpath(name).read_text(encoding="utf-8") for name in ("page.js", "copy.js"))
    return [f"\n{text}" for text in (own, script) if text]


# The pattern for waiting in all pictures; that of bars in a list is in page.css.
_WAITING = (
    '<svg class="patterns" width="0" height="0" aria-hidden="true"><defs><pattern id="waiting" width="5.5" '
    'height="5.5" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">'
    '<path class="ground" d="M0 0h5.5v5.5H0z"/><path class="hatch" d="M4 0h1.5v5.5H4z"/></pattern></defs></svg>'
)


# The icon: four bars.
_BARS = (
    b'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 32 32"><path fill="#0072b2" d="M0 0h32v32H0z"/>'
    b'<path fill="#fff" d="M4 4h24v3H4zM12 11h16v3H12zM8 18h20v3H8zM18 25h10v3H18z"/></svg>'
)
_ICON = "data:image/svg+xml;base64," + base64.b64encode(_BARS).decode()


def header(title: str, under: str, state: str = "") -> str:
    """The head of the page: a title and a line under it. state: HTML that shows the state of the run."""
    theme = '<button type="button" class="theme" aria-label="Light or dark" title="Light or dark">◐</button>'
    return (
        f'<div class="top"><p class="brand">paceline</p>{state}{theme}</div>'
        f'<h1>{escape(title)}</h1><p class="about">{escape(under)}</p>'
    )


Card = tuple[str, str, str, float | None]  # value, unit, meaning, and a share to show as a bar


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
    """Findings as an HTML list, one per line."""
    return f'<ul class="findings">{"".join(f"<li>{escape(text)}</li>" for text in sentences)}</ul>'


REPORT = "report.html"


def write(run: Run, path: str | os.PathLike[str] | None = None) -> Path:
    """Write one run's report to ``path``, by default into its directory; returns the file's path.

    Raises PacelineError for a run without a round.
    """
    return write_whole(Path(path) if path is not None else run.path / REPORT, render(run))


def write_comparison(runs: Sequence[Run], path: str | os.PathLike[str]) -> Path:
    """Write one page that compares runs; returns the file's path."""
    return write_whole(path, render_comparison(runs))


def render(run: Run) -> str:
    """One run's report as HTML."""
    _check(run)
    summary = summarize(run)
    title = f"{run.policy} on {plural(run.workers, 'worker')}"
    share = summary["share_of_bound"]
    reach = f": {percent(share)} of their combined speed" if share is not None else ""
    body = cards(_cards(summary, final_loss(run))) + points(findings(run)) + _pictures(Columns.of(run))
    about = about_config(run.config, plural(len(run.round), "round"))
    return page(f"{title} · Paceline", header(title + reach, about), body)


def _cards(summary: dict[str, Any], final: float | None) -> list[Card]:
    bound, share = number(summary["bound_samples_per_second"]), summary["share_of_bound"]
    entries: list[Card] = [
        (number(summary["samples_per_second"]), "samples/s", f"of {bound} possible without waiting", None),
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
    """The HTML of all charts of one run."""
    return f'<div class="charts">{"".join(figures(columns))}</div>'


def figures(columns: Columns, start: int = 0, end: int | None = None, recent: int | None = None) -> list[str]:
    """All charts of one run, or of a range of its rounds. recent: measure slowness over this many last rounds."""
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
    """One line on what was run, from run.json."""
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
    """The comparison of several runs as HTML."""
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
    about = "" if differences(runs) else about_config(runs[0].config, plural(len(runs[0].round), "round"))
    return page("Comparison · Paceline", header(said[0], about), body)


def _rates(named: list[tuple[str, Run]]) -> str:
    """The chart of each run's samples per second, against the combined speed of its workers."""
    rows, figures, summaries = [], [], [summarize(run) for _, run in named]
    both = [(s["samples_per_second"], s["bound_samples_per_second"]) for s in summaries]
    most = max(rate or 0.0 for pair in both for rate in pair) or 1.0
    for i, ((name, _), (real, possible), summary) in enumerate(zip(named, both, summaries, strict=True)):
        rate, bound, share = real or 0.0, possible or 0.0, summary["share_of_bound"]
        parts = [(f"r{i % BANDS}", rate / most), ("rest", max(bound - rate, 0.0) / most)]
        rows.append((name, parts, f"{number(rate)} · {percent(share)}"))
        figures.append((name, number(real), number(possible), percent(share, 1)))
    return draw.figure(
        "Samples per second",
        "Colour: the samples per second of the run. Grey: the rest of its workers' combined speed.",
        draw.bars(rows),
        table=draw.table(("run", "samples/s", "possible", "share of possible"), figures),
    )


def _side_by_side(named: list[tuple[str, Columns]]) -> str:
    """The chart of the last rounds of all runs on one scale of time."""
    shown = min(charts.SHOWN, *(len(columns) for _, columns in named))
    parts = [(name, columns, len(columns) - shown, len(columns)) for name, columns in named]
    says = "All runs have the same scale of time, so a shorter one is faster."
    return charts.strips(f"The last {plural(shown, 'round')} of each", says, parts, "run")


HEADS = ("run", "samples/s", "of bound", "waiting", "time", "mean loss", "accuracy", "loads")


def side_by_side(runs: Sequence[Run], listed: int = BANDS) -> list[tuple[str, ...]]:
    """The figures of several runs as text, a row per run, for the columns ``HEADS``.

    listed: workers whose loads are listed; of more, the cell has the least and the most.
    """
    rows: list[tuple[str, ...]] = []
    for name, s in zip(labels(runs), map(summarize, runs), strict=True):
        loads = s["final_batches"]
        split = "/".join(map(str, loads)) if len(loads) <= listed else f"{min(loads)} to {max(loads)}"
        speed = number(s["samples_per_second"]), percent(s["share_of_bound"], 1), percent(s["idle_share"], 1)
        learnt = number(s["train_loss"]), percent(s.get("test_accuracy"), 1)
        rows.append((name, *speed, seconds(s["seconds"]), *learnt, split))
    return rows
