"""The two requests of which workers send one in every round, answered without FastAPI's routing and injection.

That is half of the time of an answer, and 1,000 workers may ask in the same instant. Whatever is not plainly one of
the two, or has a mistake in it, goes on to FastAPI, which says what is wrong; its description has both.
"""

from __future__ import annotations

import json
import re
from typing import Any

from pydantic import ValidationError

from paceline.client import Part
from paceline.errors import PacelineError
from paceline.serve import models
from paceline.serve.jobs import Lengths, LengthsWanted
from paceline.serve.limits import App, Message, Receive, Send, before
from paceline.serve.refusals import status_of
from paceline.serve.service import Service

MOST_WAIT = 60.0  # seconds that one request may wait for a plan
USUAL_WAIT = 30.0  # of a worker that asks for its part and says nothing of it
_NAME = models.NAME.strip("^$")
_PATH = re.compile(rf"/v1/jobs/(?P<job>{_NAME})/workers/(?P<worker>{_NAME})/(?P<what>reports|next)")
_WAIT = re.compile(rb"wait=([0-9]{1,9}(?:\.[0-9]{1,9})?)")
Answer = tuple[int, dict[str, Any]]  # status and body


async def report(
    service: Service, job: str, worker: str, secret: str, body: models.WorkerReport, wait: float | None
) -> Answer:
    """A worker reports a round; with a wait, it also asks for its next part."""
    await service.report(job, worker, secret, body.report())
    if wait is None:
        return 200, {"round": body.round, "next": None, "waiting": ""}
    try:
        part = await service.next(job, worker, secret, wait)
    except PacelineError as error:
        part = str(error)  # the worker may have left meanwhile, say: the report counts all the same
    if isinstance(part, str | LengthsWanted):
        return 200, {"round": body.round, "next": None, "waiting": str(part)}
    return 200, {"round": body.round, "next": _said(part), "waiting": ""}


async def next_part(
    service: Service, job: str, worker: str, secret: str, wait: float, lengths: Lengths | None = None
) -> Answer:
    """A worker asks for its part of its next round."""
    part = await service.next(job, worker, secret, wait, lengths)
    if isinstance(part, LengthsWanted):
        return 202, {"waiting": str(part), "round": part.number}
    if isinstance(part, str):
        return 202, {"waiting": part}
    return 200, _said(part)


def _said(part: Part) -> dict[str, Any]:
    """The part for the answer: which samples those are is only said where they cost differently."""
    return {name: value for name, value in part._asdict().items() if value is not None}


class Quick:
    """ASGI middleware behind ``Bounded``: answers the two requests, and hands all others on."""

    def __init__(self, app: App, service: Service) -> None:
        self._app, self._service = app, service

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        asked = _PATH.fullmatch(scope["path"]) if scope["type"] == "http" else None
        wait = _wait(scope["query_string"]) if asked else -1.0
        if asked is None or wait == -1.0:
            await self._app(scope, receive, send)
            return
        job, worker, what = asked["job"], asked["worker"], asked["what"]
        secret = next((value for name, value in scope["headers"] if name == b"x-worker-secret"), b"").decode(
            "latin-1"
        )
        if what == "next" and scope["method"] == "GET":
            scope["endpoint"] = next_part
            answer = next_part(self._service, job, worker, secret, USUAL_WAIT if wait is None else wait)
        elif what == "reports" and scope["method"] == "POST":
            message = await receive()
            body = _read(message)
            if body is None:
                await self._app(scope, before(message, receive), send)
                return
            scope["endpoint"] = report
            answer = report(self._service, job, worker, secret, body, wait)
        else:
            await self._app(scope, receive, send)
            return
        try:
            status, said = await answer
        except PacelineError as error:
            status, said = status_of(error), {"error": str(error)}
        await _send(send, status, said)


def _wait(query: bytes) -> float | None:
    """Seconds to wait; None where nothing is said of it, -1 where something else is said."""
    if not query:
        return None
    found = _WAIT.fullmatch(query)
    seconds = float(found[1]) if found else -1.0
    return seconds if seconds <= MOST_WAIT else -1.0


def _read(message: Message) -> models.WorkerReport | None:
    """The report in a whole body; None where there is none."""
    if message["type"] != "http.request" or message.get("more_body", False):
        return None
    try:
        return models.WorkerReport.model_validate(json.loads(message.get("body", b"")))
    except (ValueError, ValidationError, RecursionError):
        return None


async def _send(send: Send, status: int, said: dict[str, Any]) -> None:
    body = json.dumps(said, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()
    headers = [(b"content-length", str(len(body)).encode()), (b"content-type", b"application/json")]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
