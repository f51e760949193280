"""The live pages of a directory that may hold several runs, or none yet.

``/`` shows the run that was started last, and goes over to the next one when that begins; each has an address of its
own, ``/runs/NAME/``.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import quote

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.routing import Mount

from paceline.live.app import Live, app
from paceline.runs.folder import runs_in


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
