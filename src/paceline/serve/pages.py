"""The service's pages for people: the overview of all jobs, and the page that asks for the token."""

from __future__ import annotations

from html import escape
from importlib import resources

import numpy as np

from paceline.live.pages import HEADERS
from paceline.live.panel import EXPECTED, QUIET
from paceline.runs.report import header, page, policy
from paceline.runs.words import number, plural, seconds
from paceline.serve.catalog import Catalog, JobRuntime

HEAD = ("job", "state", "workers", "rounds", "samples/s", "newest round")
SCRIPT = resources.files("paceline.serve").joinpath("overview.js").read_text(encoding="utf-8")
FORM = HEADERS | {"Content-Security-Policy": f"{policy(form=True)}; frame-ancestors 'none'"}
PAGE = HEADERS | {"Content-Security-Policy": f"{policy(SCRIPT)}; frame-ancestors 'none'"}


def render(catalog: Catalog, now: float) -> str:
    """The overview. now: the service's time."""
    rows = [_row(runtime, now) for _, runtime in sorted(catalog.running.items())]
    rows += [
        f'<tr><th scope="row">{escape(name)}</th><td colspan="{len(HEAD) - 1}"><b>set aside</b> '
        f"<small>{escape(why)}</small></td></tr>"
        for name, why in sorted(catalog.aside.items())
    ]
    head = "".join(f'<th scope="col">{each}</th>' for each in HEAD)
    shown = (
        '<div class="card scroll" tabindex="0" role="group" aria-label="The jobs in a table"><table class="jobs">'
        f"<thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table></div>"
        if rows
        else '<p class="notice">There is no job yet: <code>PUT /v1/jobs/NAME</code> creates one.</p>'
    )
    under = "Rates are those of the last rounds. The page refreshes itself."
    title = plural(len(rows), "job") if rows else "No job yet"
    plain = (
        '<noscript><p class="notice">Without JavaScript, reload the page for newer figures.</p></noscript>'
    )
    lost = '<p class="notice lost" id="lost" role="status" hidden>The connection to the service is lost; this page '
    lost += "reconnects by itself.</p>"
    links = '<p class="says"><a href="openapi.json">The API, for programs</a></p>'
    body = f'{plain}{lost}<div id="jobs">{shown}</div>{links}'
    return page(f"{title} · Paceline", header(title, under), body, SCRIPT)


def _row(runtime: JobRuntime, now: float) -> str:
    job, name = runtime.job, escape(runtime.name)
    lately = list(runtime.lately)
    spent = sum(each.seconds for each in lately)
    rate = sum(float(np.nansum(each.loads)) for each in lately) / spent if spent > 0 else None
    word, sentence = _state(runtime, now)
    cells = (
        f"<b>{word}</b> <small>{escape(sentence)}</small>",
        f"{job.members.count} of {job.settings.workers}",
        f"{job.closed:,}",
        number(rate),
        seconds(lately[-1].seconds if lately else None),
    )
    link = f'<th scope="row"><a href="jobs/{name}/">{name}</a></th>'
    # On a narrow screen page.css shows the column's head, data-head, before each cell.
    row = "".join(f'<td data-head="{head}">{cell}</td>' for head, cell in zip(HEAD[1:], cells, strict=True))
    return f"<tr>{link}{row}</tr>"


def _state(runtime: JobRuntime, now: float) -> tuple[str, str]:
    """The job's state in a word, and a sentence on what it waits for, or ""."""
    job, lately = runtime.job, runtime.lately
    if not job.members.count:
        return ("finished" if job.closed else "waiting"), "no worker is present"
    if not lately:
        return "waiting", str(job.waiting_for())
    silent = now - lately[-1].ended
    if silent > max(QUIET, EXPECTED * max(each.seconds for each in lately)):
        return "silent", f"no round for {seconds(silent)}; {job.waiting_for()}".rstrip("; ")
    return "running", ""


def asks_token() -> str:
    """HTML with a field for the token, for a browser that has not sent it yet."""
    field = (
        '<form method="get" class="card token"><label>Token <input type="password" name="token" required autofocus '
        'autocomplete="current-password"></label> <button>Open</button></form><p class="says">The token was printed '
        "when the service started, or is stored in its directory. Programs send it as <code>Authorization: Bearer "
        "TOKEN</code>.</p>"
    )
    head = header("This service asks for its token", "A browser sends it once; the address does not keep it.")
    return page("Token · Paceline", head, field, form=True)
