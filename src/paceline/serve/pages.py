"""The service's pages for people: what each job has done lately, the API, and the one that asks for the token."""

from __future__ import annotations

from html import escape
from typing import Any

import numpy as np

from paceline.runs import svg
from paceline.runs.draw import table
from paceline.runs.page import header, page, policy
from paceline.runs.summary import LATE
from paceline.runs.words import number, plural, seconds
from paceline.serve.catalog import Catalog, JobRuntime
from paceline.serve.events import Closed

MAJORITY = 0.5  # of the recent rounds, for a worker to be the straggler
QUIET, EXPECTED = 5.0, 8.0  # seconds, and times the longest recent round, without a round: longer is silence
HEAD = ("job", "state", "workers", "rounds", "samples/s", "straggler", "seconds of a round")
HEADERS = {"X-Content-Type-Options": "nosniff", "Referrer-Policy": "no-referrer"}
FORM = HEADERS | {
    "Content-Security-Policy": "default-src 'none'; base-uri 'none'; frame-ancestors 'none'; form-action 'self'",
    "Cache-Control": "no-store",
}
PAGE = HEADERS | {
    "Content-Security-Policy": f"{policy()}; frame-ancestors 'none'",
    "Cache-Control": "no-store",
}


def render(catalog: Catalog, now: float, query: str) -> str:
    """The page. now: the service's time; query: what follows "?" in its address, the token among it."""
    after = f"?{escape(query)}" if query else ""
    rows = [_row(runtime, now, after) for _, runtime in sorted(catalog.running.items())]
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
        else '<p class="notice">There is no job yet: <code>PUT /v1/jobs/NAME</code> makes one.</p>'
    )
    under = "Rates, stragglers and curves tell of the last rounds. Load the page again for newer figures."
    title = plural(len(rows), "job") if rows else "No job yet"
    links = '<p class="says"><a href="docs">The API</a></p>'
    return page(f"{title} · Paceline", header(title, under), shown + links)


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
    info = description["info"]
    parts = [
        _operation(description, method.upper(), path, operation)
        for path, methods in description["paths"].items()
        for method, operation in methods.items()
    ]
    title = f"{info['title']} API"
    return page(
        title,
        header(f"{title} {info['version']}", info["description"]),
        "<p>Every request carries <code>Authorization: Bearer TOKEN</code>; those of a worker also "
        '<code>X-Worker-Secret</code>. Errors are <code>{"error": "a sentence"}</code>. '
        '<a href="openapi.json">openapi.json</a></p>' + "".join(parts),
    )


def asks_token() -> str:
    """HTML with a field for the token, for a browser that came without; it puts the token into the address."""
    return (
        "<!doctype html><html lang=en><meta charset=utf-8><meta name=viewport content='width=device-width'>"
        "<meta name=referrer content=no-referrer><meta name=color-scheme content='light dark'><title>Paceline</title>"
        "<main><h1>This service asks for its token</h1><form method=get><p><label>Token "
        "<input type=password name=token required autofocus autocomplete=current-password></label> "
        "<button>Open</button></p></form><p>It was printed when the service began, or is kept in its directory. "
        "Programs send it as <code>Authorization: Bearer TOKEN</code>.</p></main></html>"
    )


def _operation(description: dict[str, Any], method: str, path: str, operation: dict[str, Any]) -> str:
    def schema(part: dict[str, Any]) -> list[tuple[str, str, str]]:
        return _fields(description, part.get("content", {}).get("application/json", {}).get("schema", {}))

    given = [
        (each["name"], each["in"], _kind(each.get("schema", {})), each.get("description", ""))
        for each in operation.get("parameters", [])
    ]
    given += [(name, "body", kind, text) for name, kind, text in schema(operation.get("requestBody", {}))]
    answers = [
        (status, answer["description"], ", ".join(f"{name}: {kind}" for name, kind, _ in schema(answer)))
        for status, answer in sorted(operation["responses"].items())
    ]
    tables = table((), given) + table((), answers)
    said = escape(operation.get("description", ""))
    return f"<details><summary><code>{method} {escape(path)}</code> {said}</summary>{tables}</details>"


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
