"""The live pages as ASGI applications: for one run (alone or mounted in another application) or for a folder of runs.

Each run directory is read and drawn once for all pages that show it. A page polls for the newest panel, and the
server sends the panel only if it has changed.

The page of a folder shows the run that was started last at ``/`` and switches to the next run when it starts;
each run also has its own address, ``/runs/NAME/``.
"""

from __future__ import annotations

import asyncio
import gzip
import json
import os
import re
import threading
import time
from collections.abc import Callable
from functools import lru_cache
from http import HTTPStatus
from importlib import resources
from pathlib import Path
from typing import Any
from urllib.parse import quote

from paceline.commands import installation
from paceline.errors import PacelineError
from paceline.live import panel
from paceline.live.tail import Tail
from paceline.runs import charts, report
from paceline.runs.columns import RECENT
from paceline.runs.findings import findings
from paceline.runs.report import header, page, points, policy
from paceline.runs.run import runs_in
from paceline.runs.words import plural

try:
    from starlette.applications import Starlette
    from starlette.exceptions import HTTPException
    from starlette.requests import Request
    from starlette.responses import HTMLResponse, JSONResponse, Response
    from starlette.routing import Mount, Route
except ModuleNotFoundError as error:
    raise PacelineError(f"the live page needs fastapi and uvicorn; {installation('cli')}") from error

FOLLOWED = 4  # runs whose records are kept in memory
POLL = 0.25  # seconds between two polls of the directory
READING = 0.4  # seconds of reading a long record between two panels
JUDGE = 2.0  # seconds between two estimates of what balancing saves
KEPT = 8  # ranges of rounds whose charts are cached
Find = Callable[[Request], Path | str | None]
Others = Callable[[Request], list[dict[str, Any]]]
HEADERS = {"Cache-Control": "no-store", "X-Content-Type-Options": "nosniff", "Referrer-Policy": "no-referrer"}


def app(run_dir: str | os.PathLike[str] | Find, *, others: Others = lambda request: []) -> Starlette:
    """The application that serves the page at ``/``, its content at ``/panel`` and its charts at ``/figures``.

    Args:
        run_dir: The run's directory; or a function that returns it for a request (None answers 404), for an
            application that is mounted where the path names the run. The page repeats the query string of its address
            in its requests.
        others: A function that returns the runs that the page links to besides this one, each with ``name``, ``href``
            and ``current``.

    Returns:
        An ASGI application; mount it, or run it with uvicorn.
    """
    return Starlette(routes=_routes(run_dir, others), exception_handlers={HTTPException: _refused})


def folder_app(folder: Path) -> Starlette:
    """The pages of a run directory, or of all runs directly below a directory, which may not exist yet."""

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

    pages = app(newest, others=others)
    pages.routes.append(Mount("/runs/{name}", routes=_routes(named, others)))
    return pages


def _routes(run_dir: str | os.PathLike[str] | Find, others: Others) -> list[Route]:
    """The routes of the page and of the data that it requests; the runs are followed as long as the routes exist."""
    html, its_policy = _page()
    followed = lru_cache(FOLLOWED)(Follower)

    def of(request: Request) -> Follower:
        """The follower of the requested run. Raises HTTPException if there is no such run."""
        found = run_dir(request) if callable(run_dir) else run_dir
        if found is None:
            raise HTTPException(404, "there is no run with this name; see the list of runs")
        return followed(Path(found))

    async def shown(request: Request) -> Response:
        of(request)
        return HTMLResponse(html, headers=HEADERS | {"Content-Security-Policy": its_policy})

    async def its_panel(request: Request) -> Response:
        mark, data = await of(request).shot()
        headers = HEADERS | {"ETag": mark}
        if request.headers.get("if-none-match") == mark:
            return Response(status_code=304, headers=headers)
        return Response(data, media_type="application/json", headers=headers)

    async def figures(request: Request) -> Response:
        """The charts of rounds ``?from=100&to=200``, of the ``?newest=100`` rounds, or of all rounds."""
        first, last, newest = (_number(request, name) for name in ("from", "to", "newest"))
        content = await of(request).figures(first, last, None if newest is None else max(int(newest), 1))
        data, headers = content.encode(), dict(HEADERS)
        if "gzip" in request.headers.get("accept-encoding", ""):
            data, headers["Content-Encoding"] = gzip.compress(data, 1), "gzip"
        return Response(data, media_type="application/json", headers=headers)

    async def beside(request: Request) -> Response:
        return JSONResponse(others(request), headers=HEADERS)

    endpoints = {"/": shown, "/panel": its_panel, "/figures": figures, "/others": beside}
    return [Route(path, endpoint) for path, endpoint in endpoints.items()]


def _refused(request: Request, error: Exception) -> Response:
    """The answer to an unknown path, a wrong method, an unknown run or an invalid number."""
    assert isinstance(error, HTTPException)
    message = error.detail
    if message == HTTPStatus(error.status_code).phrase:
        message = f"{message.lower()}: expected GET of the run's page, its panel or its figures"
    return JSONResponse({"error": message}, error.status_code, error.headers)


def _number(request: Request, name: str) -> float | None:
    text = request.query_params.get(name)
    if text is not None and not re.fullmatch(r"[0-9]{1,15}(\.[0-9]{0,15})?", text):
        raise HTTPException(400, f"{name}={text[:40]!r}: expected a round number, 0 or more")
    return None if text is None else float(text)


def _page() -> tuple[str, str]:
    """The page's HTML, and the security policy that allows only its own scripts and server, and no framing."""
    here = resources.files("paceline.live").joinpath("static")
    body = here.joinpath("live.html").read_text(encoding="utf-8")
    script = here.joinpath("live.js").read_text(encoding="utf-8")
    pill = '<p class="pill" id="state" role="status"><i></i><span></span></p>'
    html = page("Paceline", header("Paceline", "", pill), body, script)
    return html, f"{policy(script)}; frame-ancestors 'none'"  # which has no effect in a meta element


class Follower:
    """Follows one run for all its pages: polls only while pages send requests; callable from many tasks."""

    def __init__(self, run_dir: Path) -> None:
        self._tail = Tail(run_dir)
        self._lock = threading.Lock()  # one thread at a time reads or extends the tail
        self._polling = asyncio.Lock()
        self._polled = self._judged_at = 0.0
        self._judged = ""  # the mark of the record that the two judgements are of
        self._saving: panel.Saving | None = None
        self._speeds: list[str] = []
        self._shot = "", ""
        self._drawn = lru_cache(KEPT)(self._draw)

    async def shot(self) -> tuple[str, str]:
        """An ETag that changes with the panel, and the newest panel as JSON, at most ``POLL`` seconds old."""
        async with self._polling:
            if time.monotonic() - self._polled >= POLL or not self._shot[0]:
                self._shot = await asyncio.to_thread(self._look)
                self._polled = time.monotonic()
            return self._shot

    async def figures(self, first: float | None, last: float | None, newest: int | None) -> str:
        """The charts, as JSON, of the rounds from ``first`` to before ``last``, or of the last ``newest`` rounds."""
        await self.shot()
        return await asyncio.to_thread(self._figures, first, last, newest)

    def _look(self) -> tuple[str, str]:
        with self._lock:
            end = time.monotonic() + READING
            changed = self._tail.poll()
            while self._tail.more and time.monotonic() < end:
                self._tail.poll()
            word, _ = panel.state(self._tail)
            due = time.monotonic() - self._judged_at >= JUDGE or word == "finished"
            if due and self._judged != self._tail.mark:  # also when no further round has come since
                self._saving = panel.saving(self._tail.columns)
                self._speeds = panel.speeds(self._tail.columns)
                self._judged_at, self._judged = time.monotonic(), self._tail.mark
            mark = f'"{self._tail.mark}-{self._judged}-{word}"'
            if not changed and mark == self._shot[0]:
                return self._shot
            content = panel.panel(self._tail, self._saving, self._speeds)
            columns, finished = self._tail.columns, word == "finished"
            whole = findings(columns.part(0, len(columns))) if finished else []  # the same as in the report
            content["findings"] = points(whole) if whole else ""
            return mark, _json(content)

    def _figures(self, first: float | None, last: float | None, newest: int | None) -> str:
        with self._lock:
            columns = self._tail.columns
            if not len(columns):
                return _json({"rounds": 0, "span": [], "overview": "", "charts": [], "says": ""})
            if newest is None:
                return self._drawn(self._tail.mark, *columns.places(first, last))
            return self._drawn(self._tail.mark, max(len(columns) - newest, 0), len(columns))

    def _draw(self, mark: str, start: int, end: int) -> str:
        """The charts of a range of the record as it was at ``mark``, which serves as a key of the cache."""
        columns = self._tail.columns
        rounds = columns["round"]
        first, last = int(rounds[start]), int(rounds[end - 1])
        of = f"Rounds {first:,} to {last:,} of {len(columns):,}"
        return _json(
            {
                "rounds": len(columns),
                "span": [first, last + 1],
                "whole": [int(rounds[0]), int(rounds[-1]) + 1],
                "says": f"All {plural(len(columns), 'round')}" if end - start == len(columns) else of,
                "overview": charts.overview(columns.window(recent=1)),
                "charts": report.figures(columns, start, end, RECENT),
            }
        )


def _json(content: dict[str, Any]) -> str:
    return json.dumps(content, separators=(",", ":"), ensure_ascii=False)
