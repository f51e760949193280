"""What stands before the API: connections that send nothing are cut off, a client's requests are bounded and carry
the token, and two of them go a short way; and what runs the service in this process until it is told to stop.

``Bounded`` lets bodies in that are small and arrive in time; whoever exceeds that is answered, and nothing more is
kept. It answers the two requests of which workers send one in every round without FastAPI's routing and injection:
that is half of the time of an answer, and 1,000 workers may ask in the same instant. Whatever is not plainly one of
the two, or has a mistake in it, goes on to FastAPI, which says what is wrong and describes both.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import re
import signal
import socket
import sys
import urllib.parse
from collections.abc import Callable, Coroutine, Iterator
from types import FrameType
from typing import Any

import uvicorn
from fastapi import FastAPI
from pydantic import ValidationError
from starlette.datastructures import Headers
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from paceline import tokens
from paceline.client import Part
from paceline.errors import PacelineError
from paceline.files import allow_open
from paceline.serve import models
from paceline.serve.events import Report, status_of
from paceline.serve.pages import FORM, asks_token
from paceline.serve.service import Service

BODY_BYTES = 256 * 1024
BODY_SECONDS = 10.0
LINGER_SECONDS = 2.0  # for which a client that was refused may go on sending
MOST_WAIT = 60.0  # seconds that one request may wait for a plan
USUAL_WAIT = 30.0  # of a worker that asks for its part and says nothing of it
HEALTH = "/v1/health"
OPEN = ("/openapi.json", HEALTH)  # without the token: they name no job
JSON = b"application/json"
_NAME = models.NAME.strip("^$")
_PATH = re.compile(rf"/v1/jobs/(?P<job>{_NAME})/workers/(?P<worker>{_NAME})/(?P<what>reports|next)")
_WAIT = re.compile(rb"(?:wait=([0-9]{1,9}(?:\.[0-9]{1,9})?))?")


class _Refused(Exception):
    """The answer to a request that goes no further. form: with a page for people. read: its whole body is here."""

    def __init__(self, status: int, sentence: str, form: bool = False, read: bool = False) -> None:
        super().__init__(sentence)
        self.status, self.form, self.read = status, form, read


class Bounded:
    """ASGI middleware: the app behind it gets whole bodies, and requests that may be made and go no short way.

    token: the digest of the service's; None lets everybody in.
    """

    def __init__(
        self, app: ASGIApp, service: Service, token: str | None, seconds: float = BODY_SECONDS
    ) -> None:
        self.app, self.service, self.token, self.seconds = app, service, token, seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        try:
            self._admit(scope, headers)
            body = await self._whole(receive, headers)
        except _Refused as refusal:
            await _refuse(refusal, receive, send)
            return
        answer = self._quick(scope, body)
        if answer is None:
            await self.app(scope, _before(body, receive), send)
            return
        try:
            said = await answer
        except PacelineError as error:
            said = JSONResponse({"error": str(error)}, status_of(error))
        await said(scope, receive, send)

    def _admit(self, scope: Scope, headers: dict[bytes, bytes]) -> None:
        """Raises _Refused for a request that may not be made."""
        if self.token is None:
            host = headers.get(b"host", b"")
            name = host.rsplit(b":", 1)[0] if not host.endswith(b"]") else host
            if name.lower() not in (b"localhost", b"127.0.0.1", b"[::1]"):
                # A page in a browser could reach this address under a name of its own.
                raise _Refused(403, "without a token the service answers to localhost alone: use that name")
            return
        if scope["path"] in OPEN:
            return
        scheme, _, given = headers.get(b"authorization", b"").partition(b" ")
        if scheme.lower() == b"bearer" and tokens.matches(given.strip().decode("latin-1"), self.token):
            return
        # A browser sends no such header: for the pages for people the token stands in their address.
        page = scope["path"] == "/" or scope["path"].startswith("/jobs/")
        query = urllib.parse.parse_qs(scope["query_string"].decode("latin-1")) if page else {}
        if page and tokens.matches(query.get("token", [""])[0], self.token):
            return
        form = page and scope["method"] == "GET" and b"text/html" in headers.get(b"accept", b"")
        raise _Refused(
            401, "the token is missing or wrong: send the header Authorization: Bearer TOKEN", form=form
        )

    async def _whole(self, receive: Receive, headers: dict[bytes, bytes]) -> bytes:
        """The body. Raises _Refused if it is not as it should be."""
        length = headers.get(b"content-length", b"0")
        if length == b"0" and b"transfer-encoding" not in headers:
            return b""
        try:
            async with asyncio.timeout(self.seconds):
                body = await _body(receive, length)
        except TimeoutError:
            sentence = f"the body did not arrive within {self.seconds:g} s: send it at once"
            raise _Refused(408, sentence) from None
        kind = headers.get(b"content-type", b"").partition(b";")[0].strip().lower()
        if body and kind != JSON:
            # Nor can a page elsewhere send this type without asking first.
            sentence = "the body is of another type: send the header Content-Type: application/json"
            raise _Refused(415, sentence, read=True)
        return body

    def _quick(self, scope: Scope, body: bytes) -> Coroutine[Any, Any, JSONResponse] | None:
        """What answers one of the two requests; None for all others, and where there may be a mistake."""
        asked, found = _PATH.fullmatch(scope["path"]), _WAIT.fullmatch(scope["query_string"])
        wait = float(found[1]) if found and found[1] else None
        if asked is None or found is None or (wait or 0.0) > MOST_WAIT:
            return None
        whose = asked["job"], asked["worker"], Headers(scope=scope).get("x-worker-secret", "")
        if (scope["method"], asked["what"]) == ("GET", "next"):
            scope["endpoint"] = next_part
            return next_part(self.service, *whose, USUAL_WAIT if wait is None else wait)
        if (scope["method"], asked["what"]) == ("POST", "reports"):
            with contextlib.suppress(ValidationError):
                told = models.WorkerReport.model_validate_json(body)
                scope["endpoint"] = report
                return report(self.service, *whose, told, wait)
        return None


async def _body(receive: Receive, length: bytes) -> bytes:
    """The whole body. Raises _Refused if it is too large, or its header says so, or its sender has gone."""
    parts: list[bytes] = []
    left, more = (BODY_BYTES if length.isdigit() and int(length[:20]) <= BODY_BYTES else -1), True
    while more and left >= 0:
        message = await receive()
        parts.append(message.get("body", b""))
        left -= len(parts[-1]) if message["type"] == "http.request" else BODY_BYTES + 1
        more = message.get("more_body", False)
    if left < 0:
        raise _Refused(413, f"the body is too large: expected {BODY_BYTES} bytes at most")
    return b"".join(parts)


def _before(body: bytes, receive: Receive) -> Receive:
    """Gives the body, which was read already, in one message, then what follows."""
    messages: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def replay() -> Message:
        return messages.pop() if messages else await receive()

    return replay


async def _refuse(refusal: _Refused, receive: Receive, send: Send) -> None:
    """Answer with an error, and close the connection: what the client may still be sending is not kept."""
    headers = {"connection": "close"} | ({"www-authenticate": "Bearer"} if refusal.status == 401 else {})
    answer: Response = JSONResponse({"error": str(refusal)}, refusal.status, headers)
    if refusal.form:
        answer = HTMLResponse(asks_token(), refusal.status, headers | FORM)
    unread = not refusal.read and not refusal.form
    await send({"type": "http.response.start", "status": refusal.status, "headers": answer.raw_headers})
    await send({"type": "http.response.body", "body": answer.body, "more_body": unread})
    if unread:
        # For a while the rest is thrown away: a client whose connection is closed while it sends sees that, and not
        # the answer.
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LINGER_SECONDS):
                while (await receive()).get("more_body", False):
                    pass
        await send({"type": "http.response.body", "body": b""})


async def report(
    service: Service, job: str, worker: str, secret: str, body: models.WorkerReport, wait: float | None
) -> JSONResponse:
    """A worker reports a round; with a wait, it also asks for its next part."""
    await service.report(job, worker, secret, Report(**vars(body)))
    part: Part | models.Waiting = models.Waiting(waiting="")
    try:
        if wait is not None:
            part = await service.next(job, worker, secret, wait)
    except PacelineError as error:
        # The worker may have left meanwhile, say: the report counts all the same.
        part = models.Waiting(waiting=str(error))
    if isinstance(part, Part):
        return JSONResponse({"round": body.round, "next": _said(part), "waiting": ""})
    return JSONResponse({"round": body.round, "next": None, "waiting": part.waiting})


async def next_part(
    service: Service, job: str, worker: str, secret: str, wait: float, lengths: models.Lengths | None = None
) -> JSONResponse:
    """A worker asks for its part of its next round."""
    part = await service.next(job, worker, secret, wait, lengths)
    if isinstance(part, Part):
        return JSONResponse(_said(part))
    return JSONResponse(part.model_dump(exclude_none=True), 202)


def _said(part: Part) -> dict[str, Any]:
    """The part for the answer: which samples those are is only said if they cost differently."""
    return {name: value for name in Part.__slots__ if (value := getattr(part, name)) is not None}


HEADER_BYTES = 64 * 1024
HEADER_SECONDS = 10.0
ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def url(listening: socket.socket) -> str:
    """Where a client on this machine finds it."""
    host, port = listening.getsockname()[:2]
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def run(app: FastAPI, service: Service, listening: socket.socket, ended: Callable[[], bool]) -> None:
    """Serve until SIGINT, SIGTERM or SIGHUP, as far as they are not ignored.

    ended: whether one came before. Its exception is lost if Python was just then destroying an object.
    """
    config = uvicorn.Config(
        app,
        http=_Impatient,
        ws="none",
        lifespan="on",
        log_level="warning",
        access_log=False,
        timeout_keep_alive=75,  # seconds that a worker's connection may rest between two rounds
        timeout_graceful_shutdown=3,  # seconds that requests under way have when the service stops
        server_header=False,
    )
    allow_open(0, "the service")
    # Requests come by the thousand: no thread may keep them waiting for long, nor a search for cyclic garbage
    # among all that was imported.
    sys.setswitchinterval(1e-3)
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 100)
    _Server(config, service, ended).run(sockets=[listening])


class _Server(uvicorn.Server):
    """Lets go of those who wait for a plan as soon as it is told to stop."""

    def __init__(self, config: uvicorn.Config, service: Service, ended: Callable[[], bool]) -> None:
        super().__init__(config)
        self._service, self._ended = service, ended

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Ends in order at the first of these signals, and then passes it on; one that is ignored stays so."""
        heard = [number for number in ENDING if signal.getsignal(number) is not signal.SIG_IGN]
        before = {number: signal.signal(number, self.handle_exit) for number in heard}
        self.should_exit = self._ended()
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
        if self._captured_signals:
            signal.raise_signal(self._captured_signals[0])

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self._service.release()
        super().handle_exit(sig, frame)


class _Impatient(HttpToolsProtocol):
    """A connection that is cut off when its request's head takes too long or grows too large."""

    _patience: asyncio.TimerHandle
    _head = 0  # bytes of the head so far; -1 while none is awaited

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._await_head()

    def connection_lost(self, error: Exception | None) -> None:
        self._head_is_there()
        super().connection_lost(error)

    def data_received(self, data: bytes) -> None:
        if self._head >= 0:
            self._head += len(data)
            if self._head > HEADER_BYTES + BODY_BYTES:
                self.transport.close()
                return
        super().data_received(data)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        if self._head < 0:
            self._await_head()

    def on_headers_complete(self) -> None:
        self._head_is_there()
        super().on_headers_complete()

    def send_400_response(self, msg: str) -> None:
        """In the API's terms."""
        answer = JSONResponse({"error": msg.rstrip(".")}, 400, {"connection": "close"})
        head = b"".join(name + b": " + value + b"\r\n" for name, value in answer.raw_headers)
        self.transport.write(b"HTTP/1.1 400 Bad Request\r\n" + head + b"\r\n" + bytes(answer.body))
        self.transport.close()

    def _await_head(self) -> None:
        self._head = 0
        self._patience = self.loop.call_later(HEADER_SECONDS, self.transport.close)

    def _head_is_there(self) -> None:
        self._head = -1
        self._patience.cancel()
