"""The service's first page: a table of its jobs, with what each has done lately."""

from __future__ import annotations

from html import escape

import numpy as np

from paceline.runs import svg
from paceline.runs.analysis import LATE
from paceline.runs.page import header, page
from paceline.runs.words import number, plural, seconds
from paceline.serve.catalog import Catalog
from paceline.serve.effects import Closed
from paceline.serve.served import Served

MAJORITY = 0.5  # of the recent rounds, for a worker to be the straggler
QUIET, EXPECTED = 5.0, 8.0  # seconds, and times the longest recent round, without a round: longer is silence
HEAD = ("job", "state", "workers", "rounds", "samples/s", "straggler", "seconds of a round")


def render(catalog: Catalog, now: float, query: str) -> str:
    """The page. now: the service's time; query: what follows "?" in its address, the token among it."""
    after = f"?{escape(query)}" if query else ""
    rows = [_row(served, now, after) for _, served in sorted(catalog.running.items())]
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


def _row(served: Served, now: float, after: str) -> str:
    job, name = served.job, escape(served.name)
    lately = list(served.lately)
    spent = sum(each.seconds for each in lately)
    rate = sum(float(np.nansum(each.loads)) for each in lately) / spent if spent > 0 else None
    word, sentence = _state(served, now)
    cells = (
        f"<b>{word}</b> <small>{escape(sentence)}</small>",
        f"{job.members.count} of {job.settings.workers}",
        f"{job.closed:,}",
        number(rate),
        escape(_straggler(served)),
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


def _state(served: Served, now: float) -> tuple[str, str]:
    """A word, and a sentence or "" for what it waits for."""
    job, lately = served.job, served.lately
    if not job.members.count:
        return ("finished" if job.closed else "waiting"), "no worker is there"
    if not lately:
        return "waiting", str(job.waiting_for())
    silent = now - lately[-1].now
    if silent > max(QUIET, EXPECTED * max(each.seconds for each in lately)):
        return "silent", f"no round for {seconds(silent)}; {job.waiting_for()}".rstrip("; ")
    return "running", ""


def _straggler(served: Served) -> str:
    """The worker that was late in most of the recent rounds."""
    places = []
    for closed in served.lately:
        known = closed.compute[~np.isnan(closed.compute)]
        if len(known) > 1 and known.max() > LATE * float(np.median(known)):
            places.append(int(np.nanargmax(closed.compute)))
    if not places:
        return "none"
    place = max(set(places), key=places.count)
    holder = served.job.members.holders[place]
    if places.count(place) <= MAJORITY * len(served.lately):
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
