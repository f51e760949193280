"""The service's pages for people: what each job has done lately, the API, and the one that asks for the token."""

from __future__ import annotations

from html import escape
from typing import Any

import numpy as np

from paceline.runs import svg
from paceline.runs.page import header, page, policy
from paceline.runs.summary import LATE
from paceline.runs.words import number, plural, seconds
from paceline.serve.catalog import Catalog, JobRuntime
from paceline.serve.events import Closed

MAJORITY = 0.5  # of the recent rounds, for a worker to be the straggler
QUIET, EXPECTED = 5.0, 8.0  # seconds, and times the longest recent round, without a round: longer is silence
HEAD = ("job", "state", "workers", "rounds", "samples/s", "straggler", "seconds of a round")
HEADERS = {"X-Content-Type-Options": "nosniff", "Referrer-Policy": "no-referrer"}
PLAIN = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; frame-ancestors 'none'"
API = HEADERS | {"Content-Security-Policy": f"{PLAIN}; form-action 'none'"}
FORM = HEADERS | {"Content-Security-Policy": f"{PLAIN}; form-action 'self'", "Cache-Control": "no-store"}
JOBS = HEADERS | {
    "Content-Security-Policy": f"{policy()}; frame-ancestors 'none'",
    "Cache-Control": "no-store",
}
STYLE = """
:root { color-scheme: light dark; font: 16px/1.5 system-ui, sans-serif; }
body { max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }
code { font-size: .9em; } summary { cursor: pointer; padding: .4rem 0; }
table { border-collapse: collapse; display: block; overflow-x: auto; }
td, th { text-align: left; vertical-align: top; padding: .15rem .8rem .15rem 0; border-bottom: 1px solid #8884; }
"""


def render(catalog: Catalog, now: float, query: str) -> str:
    """The page. now: the service's time; query: what follows "?" in its address, the token among it."""
    after = f"?{escape(query)}" if query else ""
    rows = [_row(runtime, now, after) for _, runtime in sorted(catalog.running.items())]
    rows += [_aside(name, why) for name, why in sorted(catalog.aside.items())]
    head = "".join(f'<th scope="col">{each}</th>' for each in HEAD)
    table = (
        '<div class="card scroll" tabindex="0" role="group" aria-label="The jobs in a table"><table class="jobs">'
        f"<thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table></div>"
        if rows
        else '<p class="notice">There is no job yet: <code>PUT /v1/jobs/NAME</code> makes one.</p>'
    )
    under = "Rates, stragglers and curves tell of the last rounds. Load the page again for newer figures."
    title = plural(len(rows), "job") if rows else "No job yet"
    links = '<p class="says"><a href="docs">The API</a></p>'
    return page(f"{title} · Paceline", header(title, under), table + links)


def _row(runtime: JobRuntime, now: float, after: str) -> str:
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
        escape(_straggler(runtime)),
        _sparkline(lately),
    )
    link = f'<th scope="row"><a href="jobs/{name}/{after}">{name}</a></th>'
    # On a narrow screen each cell has its head before it: page.css shows data-head there.
    told = "".join(f'<td data-head="{head}">{cell}</td>' for head, cell in zip(HEAD[1:], cells, strict=True))
    return f"<tr>{link}{told}</tr>"


def _aside(name: str, why: str) -> str:
    return (
        f'<tr><th scope="row">{escape(name)}</th><td colspan="{len(HEAD) - 1}"><b>set aside</b> '
        f"<small>{escape(why)}</small></td></tr>"
    )


def _state(runtime: JobRuntime, now: float) -> tuple[str, str]:
    """A word, and a sentence or "" for what it waits for."""
    job, lately = runtime.job, runtime.lately
    if not job.members.count:
        return ("finished" if job.closed else "waiting"), "no worker is there"
    if not lately:
        return "waiting", str(job.waiting_for())
    silent = now - lately[-1].now
    if silent > max(QUIET, EXPECTED * max(each.seconds for each in lately)):
        return "silent", f"no round for {seconds(silent)}; {job.waiting_for()}".rstrip("; ")
    return "running", ""


def _straggler(runtime: JobRuntime) -> str:
    """The worker that was late in most of the recent rounds."""
    places = []
    for closed in runtime.lately:
        known = closed.compute[~np.isnan(closed.compute)]
        if len(known) > 1 and known.max() > LATE * float(np.median(known)):
            places.append(int(np.nanargmax(closed.compute)))
    if not places:
        return "none"
    place = max(set(places), key=places.count)
    holder = runtime.job.members.holders[place]
    if places.count(place) <= MAJORITY * len(runtime.lately):
        return "none"
    return holder.name if holder is not None else f"place {place}"


def _sparkline(lately: list[Closed]) -> str:
    """The seconds of the recent rounds as a small curve from 0, and the newest in words."""
    if not lately:
        return "–"
    spent = np.array([each.seconds for each in lately])
    x = np.linspace(0, 1000, len(spent)) if len(spent) > 1 else np.array([0.0, 1000.0])
    y = svg.down(np.resize(spent, len(x)), float(spent.max()) * 1.05 or 1.0)
    words = f"from {seconds(float(spent.min()))} to {seconds(float(spent.max()))} in {plural(len(spent), 'round')}"
    return (
        f'<svg class="spark" viewBox="0 0 1000 1000" preserveAspectRatio="none" role="img" aria-label="{words}">'
        f'<path class="line c0" d="{svg.path(x, y)}"/></svg> {seconds(float(spent[-1]))}'
    )


def api(description: dict[str, Any]) -> str:
    """HTML for an OpenAPI document."""
    info, parts = description["info"], []
    for path, methods in description["paths"].items():
        for method, operation in methods.items():
            parts.append(_operation(description, method.upper(), path, operation))
    return _plain(
        f"{escape(info['title'])} API",
        f"<h1>{escape(info['title'])} API {escape(info['version'])}</h1><p>{escape(info['description'])}</p>"
        "<p>Every request carries <code>Authorization: Bearer TOKEN</code>; those of a worker also "
        '<code>X-Worker-Secret</code>. Errors are <code>{"error": "a sentence"}</code>. '
        "<a href=openapi.json>openapi.json</a></p>" + "".join(parts),
    )


def asks_token() -> str:
    """HTML with a field for the token, for a browser that came without; it puts the token into the address."""
    return _plain(
        "Paceline",
        "<main><h1>This service asks for its token</h1><form method=get><p><label>Token "
        "<input type=password name=token required autofocus autocomplete=current-password></label> "
        "<button>Open</button></p></form><p>It was printed when the service began, or is kept in its directory. "
        "Programs send it as <code>Authorization: Bearer TOKEN</code>.</p></main>",
    )


def _plain(title: str, body: str) -> str:
    return (
        "<!doctype html><html lang=en><meta charset=utf-8><meta name=viewport content='width=device-width'>"
        f"<meta name=referrer content=no-referrer><title>{title}</title><style>{STYLE}</style>{body}</html>"
    )


def _operation(description: dict[str, Any], method: str, path: str, operation: dict[str, Any]) -> str:
    rows = [
        (each["name"], each["in"], _kind(each.get("schema", {})), each.get("description", ""))
        for each in operation.get("parameters", [])
    ]
    body = operation.get("requestBody", {}).get("content", {}).get("application/json", {}).get("schema", {})
    rows += [(name, "body", kind, text) for name, kind, text in _fields(description, body)]
    answers = []
    for status, answer in sorted(operation["responses"].items()):
        schema = answer.get("content", {}).get("application/json", {}).get("schema", {})
        fields = ", ".join(f"{name}: {kind}" for name, kind, _ in _fields(description, schema))
        answers.append((status, answer["description"], fields, ""))
    return (
        f"<details><summary><code>{method} {escape(path)}</code> {escape(operation.get('description', ''))}"
        f"</summary>{_table(rows)}{_table(answers)}</details>"
    )


def _table(rows: list[tuple[str, str, str, str]]) -> str:
    cells = ("".join(f"<td>{escape(str(cell))}</td>" for cell in row) for row in rows)
    return "<table>" + "".join(f"<tr>{row}</tr>" for row in cells) + "</table>" if rows else ""


def _fields(description: dict[str, Any], schema: dict[str, Any]) -> list[tuple[str, str, str]]:
    if "$ref" in schema:
        schema = description["components"]["schemas"][schema["$ref"].rsplit("/", 1)[1]]
    return [
        (name, _kind(field), field.get("description", ""))
        for name, field in schema.get("properties", {}).items()
    ]


def _kind(schema: dict[str, Any]) -> str:
    if "$ref" in schema:
        return str(schema["$ref"].rsplit("/", 1)[1])
    if "anyOf" in schema:
        return " or ".join(_kind(each) for each in schema["anyOf"])
    kind = str(schema.get("type", ""))
    low, high = schema.get("minimum"), schema.get("maximum")
    return kind + (f" {low} to {high}" if low is not None and high is not None else "")
