"""The live page as an ASGI application, by itself or mounted in another one."""

from __future__ import annotations

import gzip
import os
import re
from collections import OrderedDict
from collections.abc import Callable
from importlib import resources
from pathlib import Path
from typing import Any

from paceline.errors import PacelineError

try:
    from starlette.applications import Starlette
    from starlette.exceptions import HTTPException
    from starlette.requests import Request
    from starlette.responses import HTMLResponse, JSONResponse, Response, StreamingResponse
    from starlette.routing import Route
except ModuleNotFoundError as error:
    raise PacelineError("the live page needs fastapi and uvicorn; install paceline[serve]") from error

from paceline.live import events
from paceline.live.follower import Follower
from paceline.runs.page import header, page, policy

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

        content = events.stream(follower.shot, seen, over)
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
