"""The live pages as ASGI applications: of one run, by itself or mounted in another one, or of a folder of runs.

Each run directory is followed for any number of pages: read and drawn once for all of them. A page gets the newest
panel by server-sent events, with ids by which one that comes back goes on.

The page of a folder shows at ``/`` the run that was started last, and goes over to the next one when that begins;
each has an address of its own, ``/runs/NAME/``.
"""

from __future__ import annotations

import asyncio
import gzip
import json
import os
import re
import threading
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable
from importlib import resources
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

from paceline.errors import PacelineError
from paceline.live import now, panel
from paceline.live.tail import Tail
from paceline.runs import charts, report
from paceline.runs.columns import RECENT
from paceline.runs.findings import findings
from paceline.runs.page import header, page, points, policy
from paceline.runs.run import runs_in
from paceline.runs.words import plural

try:
    from starlette.applications import Starlette
    from starlette.exceptions import HTTPException
    from starlette.requests import Request
    from starlette.responses import HTMLResponse, JSONResponse, Response, StreamingResponse
    from starlette.routing import Mount, Route
except ModuleNotFoundError as error:
    raise PacelineError("the live page needs fastapi and uvicorn; install paceline[serve]") from error

FOLLOWED = 4  # runs whose records are kept in memory
Find = Callable[[Request], Path | str | None]
Others = Callable[[Request], list[dict[str, Any]]]


def app(
    run_dir: str | os.PathLike[str] | Find,
    *,
    closed: Callable[[], bool] = lambda: False,
    others: Others = lambda request: [],
) -> Starlette:
    """The page at ``/``, its events at ``/events``, its charts at ``/figures``.

    run_dir: the run's directory; or a function of the request that says which (None: 404), for an application
        that is mounted where the path names the run. Whatever follows ``?`` in the page's address goes along
        with what the page asks for.
    closed: tells when the server is about to stop, so that open event streams end.
    others: the runs that the page links to beside this one, each with ``name``, ``href`` and ``current``.
    """
    return Starlette(
        routes=Live(run_dir, closed, others).routes(), exception_handlers={HTTPException: _refused}
    )


class Live:
    """The endpoints, and the runs that are being followed."""

    def __init__(
        self, run_dir: str | os.PathLike[str] | Find, closed: Callable[[], bool], others: Others
    ) -> None:
        self._find: Find = run_dir if callable(run_dir) else lambda request: Path(run_dir)
        self._closed, self._others = closed, others
        self._followed: OrderedDict[Path, Follower] = OrderedDict()
        self._page, self._policy = _page()

    def routes(self) -> list[Route]:
        """The routes, relative to where the page is."""
        return [
            Route("/", self.page, name="live"),
            Route("/events", self.events),
            Route("/figures", self.figures),
            Route("/others", self.others),
        ]

    async def page(self, request: Request) -> Response:
        """The page itself; what it shows comes by ``events`` and ``figures``."""
        if self._follower(request) is None:
            return _unknown()
        return HTMLResponse(self._page, headers=_HEADERS | {"Content-Security-Policy": self._policy})

    async def events(self, request: Request) -> Response:
        """Server-sent events: ``panel`` whenever something has changed, ``beat`` else."""
        follower = self._follower(request)
        if follower is None:
            return _unknown()
        seen, path = request.headers.get("last-event-id", ""), self._find(request)

        def over() -> (
            bool
        ):  # also where the address shows another run from now on: the page asks again for that one
            return self._closed() or self._find(request) != path

        content = stream(follower.shot, seen, over)
        return StreamingResponse(content, media_type="text/event-stream", headers=_HEADERS)

    async def others(self, request: Request) -> Response:
        """The runs beside this one."""
        return JSONResponse(self._others(request), headers=_HEADERS)

    async def figures(self, request: Request) -> Response:
        """The charts of ``?from=100&to=200`` (round numbers), of ``?newest=100`` rounds, or of all."""
        follower = self._follower(request)
        if follower is None:
            return _unknown()
        try:
            first, last, newest = (_number(request, name) for name in ("from", "to", "newest"))
        except ValueError as error:
            return JSONResponse({"error": str(error)}, 400)
        content = await follower.figures(first, last, None if newest is None else max(int(newest), 1))
        data, headers = content.encode(), dict(_HEADERS)
        if "gzip" in request.headers.get("accept-encoding", ""):
            data, headers["Content-Encoding"] = gzip.compress(data, 1), "gzip"
        return Response(data, media_type="application/json", headers=headers)

    def _follower(self, request: Request) -> Follower | None:
        path = self._find(request)
        if path is None:
            return None
        path = Path(path)
        if path not in self._followed:
            self._followed[path] = Follower(path)
            while len(self._followed) > FOLLOWED:
                self._followed.popitem(last=False)
        self._followed.move_to_end(path)
        return self._followed[path]


_HEADERS = {
    "Cache-Control": "no-store",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "X-Accel-Buffering": "no",
}


def _refused(request: Request, error: Exception) -> Response:
    """Another path than the page's own, or another method."""
    assert isinstance(error, HTTPException)
    sentence = f"{error.detail.lower()}: expected GET of the run's page, its events or its figures"
    return JSONResponse({"error": sentence}, error.status_code, error.headers)


def _unknown() -> Response:
    return JSONResponse({"error": "there is no run of that name; look at the list of runs"}, 404)


def _number(request: Request, name: str) -> float | None:
    text = request.query_params.get(name)
    if text is None:
        return None
    if not re.fullmatch(r"[0-9]{1,15}(\.[0-9]{0,15})?", text):
        raise ValueError(f"{name}={text[:40]!r}: expected a round's number, 0 or more")
    return float(text)


def _page() -> tuple[str, str]:
    """The page's HTML, and the policy that keeps it to its own script, its own server and a window of its own."""
    here = resources.files("paceline.live").joinpath("static")
    body = here.joinpath("live.html").read_text(encoding="utf-8")
    script = here.joinpath("live.js").read_text(encoding="utf-8")
    pill = '<p class="pill" id="state" role="status"><i></i><span></span></p>'
    html = page("Paceline", header("Paceline", "", pill), body, script)
    return html, f"{policy(script)}; frame-ancestors 'none'"  # which only a header can say


EVERY = 0.5  # seconds between two events to one page, at least
BEAT = 5.0  # seconds without an event after which a heartbeat goes out
RETRY = 1000  # milliseconds after which a page that lost the connection tries again


async def stream(
    newest: Callable[[], Awaitable[Shot]], seen: str, closed: Callable[[], bool]
) -> AsyncIterator[str]:
    """Events until ``closed``: each carries the whole panel, so that none that was missed matters.

    seen: id of the last event that the page got before, "" for none; it is not sent again.
    """
    yield f"retry: {RETRY}\n\n"
    sent = beat = 0.0
    while not closed():
        clock = time.monotonic()
        shot = await newest()
        if shot.id != seen and clock - sent >= EVERY:
            yield f"id: {shot.id}\nevent: panel\ndata: {shot.data}\n\n"
            seen, sent, beat = shot.id, clock, clock
        elif clock - beat >= BEAT:
            yield "event: beat\ndata: \n\n"
            beat = clock
        await asyncio.sleep(POLL)


POLL = 0.25  # seconds between two looks at the directory
READING = 0.4  # seconds of reading a long record between two panels
JUDGE = 2.0  # seconds between two judgements of what balancing saves
KEPT = 8  # stretches of the run that are kept drawn


class Shot(NamedTuple):
    """The panel as of ``id``, which changes when it does; ``data`` is its JSON."""

    id: str
    data: str


class Follower:
    """Polled while a page asks, idle otherwise; callable from many tasks."""

    def __init__(self, run_dir: Path) -> None:
        self._tail = Tail(run_dir)
        self._lock = threading.Lock()  # the tail is read by one thread at a time, and never while it grows
        self._polling = asyncio.Lock()
        self._polled = self._judged = 0.0
        self._saving: now.Saving | None = None
        self._speeds: list[str] = []
        self._shot = Shot("", "")
        self._drawn: OrderedDict[tuple[Any, ...], str] = OrderedDict()
        self._findings: tuple[str, str] = ("", "")

    async def shot(self) -> Shot:
        """The newest panel, at most ``POLL`` seconds old."""
        async with self._polling:
            if time.monotonic() - self._polled >= POLL or not self._shot.id:
                self._shot = await asyncio.to_thread(self._look)
                self._polled = time.monotonic()
            return self._shot

    async def figures(self, first: float | None, last: float | None, newest: int | None) -> str:
        """The charts of the rounds from ``first`` up to and without ``last``, or of the newest so many, as JSON."""
        await self.shot()
        return await asyncio.to_thread(self._draw, first, last, newest)

    def _look(self) -> Shot:
        with self._lock:
            end = time.monotonic() + READING
            changed = self._tail.poll()
            while self._tail.more and time.monotonic() < end:
                self._tail.poll()
            word, _ = panel.state(self._tail)
            mark = f"{self._tail.mark}-{word}"
            if not changed and mark == self._shot.id:
                return self._shot
            if time.monotonic() - self._judged >= JUDGE or word == "finished":
                self._saving = now.saving(self._tail.columns)
                self._speeds = now.speeds(self._tail.columns)
                self._judged = time.monotonic()
            content = panel.panel(self._tail, self._saving, self._speeds)
            content["findings"] = self._found(mark) if word == "finished" else ""
            return Shot(mark, _json(content))

    def _found(self, mark: str) -> str:
        """What the report of a finished run says."""
        if self._findings[0] != mark:
            columns = self._tail.columns
            self._findings = (mark, points(findings(columns.part(0, len(columns)))))
        return self._findings[1]

    def _draw(self, first: float | None, last: float | None, newest: int | None) -> str:
        with self._lock:
            columns = self._tail.columns
            if not len(columns):
                return _json({"rounds": 0, "span": [], "overview": "", "charts": [], "says": ""})
            if newest is not None:
                start, end = max(len(columns) - newest, 0), len(columns)
            else:
                start, end = columns.places(first, last)
            key = (self._tail.mark, start, end)
            if key not in self._drawn:
                rounds = columns["round"]
                span = [int(rounds[start]), int(rounds[end - 1]) + 1]
                says = (
                    f"All {plural(len(columns), 'round')}"
                    if end - start == len(columns)
                    else f"Rounds {span[0]:,} to {span[1] - 1:,} of {len(columns):,}"
                )
                self._drawn[key] = _json(
                    {
                        "rounds": len(columns),
                        "span": span,
                        "whole": [int(rounds[0]), int(rounds[-1]) + 1],
                        "says": says,
                        "overview": charts.overview(columns.window(recent=1)),
                        "charts": report.figures(columns, start, end, RECENT),
                    }
                )
                while len(self._drawn) > KEPT:
                    self._drawn.popitem(last=False)
            return self._drawn[key]


def _json(content: dict[str, Any]) -> str:
    return json.dumps(content, separators=(",", ":"), ensure_ascii=False)


def folder_app(folder: Path, closed: Callable[[], bool]) -> Starlette:
    """The pages of a run's directory, or of all runs right below a directory; it need not be there yet."""

    def newest(_: Request) -> Path:
        return (runs_in(folder) or [folder])[-1]

    def named(request: Request) -> Path | None:
        wanted = request.path_params.get("name", "")
        return next((run for run in runs_in(folder) if run.name == wanted), None)

    def others(request: Request) -> list[dict[str, Any]]:
        wanted = request.path_params.get("name")
        shown = wanted if wanted is not None else newest(request).name
        before = "../" if wanted is not None else "runs/"
        return [
            {"name": run.name, "href": f"{before}{quote(run.name)}/", "current": run.name == shown}
            for run in runs_in(folder)
        ]

    pages = app(newest, closed=closed, others=others)
    pages.routes.append(Mount("/runs/{name}", routes=list(Live(named, closed, others).routes())))
    return pages
