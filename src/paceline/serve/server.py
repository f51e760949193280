"""The server in front of the API: it cuts off connections that send nothing, limits requests, checks the token,
answers two requests on a fast path, and runs the service in this process until it is stopped.

``Bounded`` admits bodies that are small and arrive in time; others are refused, and nothing of them is kept. It
answers the two requests that workers send in every round without FastAPI's routing and injection, which take half
of the time of an answer: 1,000 workers may ask at the same moment. A request that is not clearly one of the two, or
has a mistake, continues to FastAPI, which reports the mistake and describes both requests.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import hmac
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
from paceline.live.pages import HEADERS
from paceline.serve import models
from paceline.serve.events import Report, status_of
from paceline.serve.pages import FORM, asks_token
from paceline.serve.service import Service

BODY_BYTES = 256 * 1024
BODY_SECONDS = 10.0
LINGER_SECONDS = 2.0  # seconds that a refused client may continue to send
MOST_WAIT = 60.0  # most seconds that one request may wait for a plan
USUAL_WAIT = 30.0  # the default of a request for a part
HEALTH = "/v1/health"
OPEN = ("/openapi.json", HEALTH)  # need no token, since they name no job
JSON = b"application/json"
_NAME = models.NAME.strip("^$")
_PATH = re.compile(rf"/v1/jobs/(?P<job>{_NAME})/workers/(?P<worker>{_NAME})/(?P<what>reports|next)")
_WAIT = re.compile(rb"(?:wait=([0-9]{1,9}(?:\.[0-9]{1,9})?))?")


class _Refused(Exception):
    """A request is refused. form: answer with a page for people. read: whether its whole body was read."""

    def __init__(self, status: int, sentence: str, form: bool = False, read: bool = False) -> None:
        super().__init__(sentence)
        self.status, self.form, self.read = status, form, read


class _Entered(Exception):
    """A browser has sent the token: it is kept in a cookie, and the page is shown under its address without it."""

    def __init__(self, place: str, cookie: str) -> None:
        super().__init__(place)
        self.headers = {
            "location": place,
            "set-cookie": f"{cookie}; Path=/; HttpOnly; SameSite=Lax",
        } | HEADERS


class Bounded:
    """ASGI middleware: the app behind it gets only permitted requests, with whole bodies, off the fast path.

    token: the digest of the service's token; None admits all.
    """

    def __init__(
        self, app: ASGIApp, service: Service, token: str | None, seconds: float = BODY_SECONDS
    ) -> None:
        self.app, self.service, self.token, self.seconds = app, service, token, seconds
        # Services on one host share its cookies, whatever their ports are. From the cookie the token is not known.
        key = "" if token is None else f"paceline-{token[:12]}"
        self._cookie = key, "" if token is None else tokens.digest(f"pages {token}")

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
        except _Entered as entered:
            await Response(status_code=303, headers=entered.headers)(scope, receive, send)
            return
        answer = self._quick(scope, body)
        if answer is None:
            await self.app(scope, _before(body, receive), send)
            return
        try:
            response = await answer
        except PacelineError as error:
            response = JSONResponse({"error": str(error)}, status_of(error))
        await response(scope, receive, send)

    def _admit(self, scope: Scope, headers: dict[bytes, bytes]) -> None:
        """Raise _Refused for a request that is not permitted."""
        if self.token is None:
            host = headers.get(b"host", b"")
            name = host.rsplit(b":", 1)[0] if not host.endswith(b"]") else host
            if name.lower() not in (b"localhost", b"127.0.0.1", b"[::1]"):
                # A web page in a browser could reach this address under a name that it controls (DNS rebinding).
                raise _Refused(403, "without a token the service answers only to localhost: use that name")
            return
        if scope["path"] in OPEN:
            return
        scheme, _, given = headers.get(b"authorization", b"").partition(b" ")
        if scheme.lower() == b"bearer" and tokens.matches(given.strip().decode("latin-1"), self.token):
            return
        # A browser sends no such header: the pages for people are opened once with the token in their address.
        page = scope["method"] in ("GET", "HEAD") and (
            scope["path"] == "/" or scope["path"].startswith("/jobs/")
        )
        form = page and b"text/html" in headers.get(b"accept", b"")
        query = urllib.parse.parse_qs(scope["query_string"].decode("latin-1")) if page else {}
        key, value = self._cookie
        if page and tokens.matches(query.pop("token", [""])[0], self.token):
            if not form:
                return
            rest = urllib.parse.urlencode(query, doseq=True)
            raise _Entered(urllib.parse.quote(scope["path"]) + (f"?{rest}" if rest else ""), f"{key}={value}")
        sent = headers.get(b"cookie", b"").decode("latin-1").split(";")
        if page and any(
            hmac.compare_digest(each.strip().encode(), f"{key}={value}".encode()) for each in sent
        ):
            return
        raise _Refused(
            401, "the token is missing or wrong: send the header Authorization: Bearer TOKEN", form=form
        )

    async def _whole(self, receive: Receive, headers: dict[bytes, bytes]) -> bytes:
        """The body. Raises _Refused if it is late, too large or of another type than JSON."""
        length = headers.get(b"content-length", b"0")
        if length == b"0" and b"transfer-encoding" not in headers:
            return b""
        try:
            async with asyncio.timeout(self.seconds):
                body = await _body(receive, length)
        except TimeoutError:
            sentence = f"the body did not arrive within {self.seconds:g} s: send it without delay"
            raise _Refused(408, sentence) from None
        kind = headers.get(b"content-type", b"").partition(b";")[0].strip().lower()
        if body and kind != JSON:
            # A web page of another origin cannot send this type without a preflight request.
            sentence = "the body's type is not JSON: send the header Content-Type: application/json"
            raise _Refused(415, sentence, read=True)
        return body

    def _quick(self, scope: Scope, body: bytes) -> Coroutine[Any, Any, JSONResponse] | None:
        """The answer to one of the two requests; None for all others, and if there may be a mistake."""
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
                content = models.WorkerReport.model_validate_json(body)
                scope["endpoint"] = report
                return report(self.service, *whose, content, wait)
        return None


async def _body(receive: Receive, length: bytes) -> bytes:
    """The whole body. Raises _Refused if it, or its declared length, is too large, or the sender disconnects."""
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
    """A receive function that returns the body, which was read already, in one message, and then what follows."""
    messages: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def replay() -> Message:
        return messages.pop() if messages else await receive()

    return replay


async def _refuse(refusal: _Refused, receive: Receive, send: Send) -> None:
    """Answer with an error, and close the connection; what the client still sends is discarded."""
    headers = {"connection": "close"} | ({"www-authenticate": "Bearer"} if refusal.status == 401 else {})
    answer: Response = JSONResponse({"error": str(refusal)}, refusal.status, headers)
    if refusal.form:
        answer = HTMLResponse(asks_token(), refusal.status, headers | FORM)
    unread = not refusal.read and not refusal.form
    await send({"type": "http.response.start", "status": refusal.status, "headers": answer.raw_headers})
    await send({"type": "http.response.body", "body": answer.body, "more_body": unread})
    if unread:
        # For a while the rest is read and discarded: a client whose connection is closed while it sends would see
        # that error instead of the answer.
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LINGER_SECONDS):
                while (await receive()).get("more_body", False):
                    pass
        await send({"type": "http.response.body", "body": b""})


async def report(
    service: Service, job: str, worker: str, secret: str, body: models.WorkerReport, wait: float | None
) -> JSONResponse:
    """Answer a worker's report of a round; with a wait, the worker also requests its next part."""
    await service.report(job, worker, secret, Report(**vars(body)))
    part: Part | models.Waiting = models.Waiting(waiting="")
    try:
        if wait is not None:
            part = await service.next(job, worker, secret, wait)
    except PacelineError as error:
        # For instance, the worker may have left meanwhile; its report is still valid.
        part = models.Waiting(waiting=str(error))
    if isinstance(part, Part):
        return JSONResponse({"round": body.round, "next": _content(part), "waiting": ""})
    return JSONResponse({"round": body.round, "next": None, "waiting": part.waiting})


async def next_part(
    service: Service, job: str, worker: str, secret: str, wait: float, lengths: models.Lengths | None = None
) -> JSONResponse:
    """Answer a worker that requests its part of its next round."""
    part = await service.next(job, worker, secret, wait, lengths)
    if isinstance(part, Part):
        return JSONResponse(_content(part))
    return JSONResponse(part.model_dump(exclude_none=True), 202)


def _content(part: Part) -> dict[str, Any]:
    """The part as the answer's content, without the fields that only jobs with a cost have."""
    return {name: value for name in Part.__slots__ if (value := getattr(part, name)) is not None}


HEADER_BYTES = 64 * 1024
HEADER_SECONDS = 10.0
ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def url(listening: socket.socket) -> str:
    """The address of the service for a client on this machine."""
    host, port = listening.getsockname()[:2]
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def run(app: FastAPI, service: Service, listening: socket.socket, ended: Callable[[], bool]) -> None:
    """Serve until SIGINT, SIGTERM or SIGHUP, unless the signal is ignored.

    ended: whether one of them came before; its exception is lost if it was raised in a destructor.
    """
    config = uvicorn.Config(
        app,
        http=_Impatient,
        ws="none",
        lifespan="on",
        log_level="warning",
        access_log=False,
        timeout_keep_alive=75,  # seconds that a worker's connection may be idle between two rounds
        timeout_graceful_shutdown=3,  # seconds for running requests when the service stops
        server_header=False,
    )
    allow_open(0, "the service")
    # Thousands of requests may come at once: neither another thread nor a garbage collection over all imported
    # objects may delay them for long.
    sys.setswitchinterval(1e-3)
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 100)
    _Server(config, service, ended).run(sockets=[listening])


class _Server(uvicorn.Server):
    """Answers the requests that wait for a plan as soon as it is stopped."""

    def __init__(self, config: uvicorn.Config, service: Service, ended: Callable[[], bool]) -> None:
        super().__init__(config)
        self._service, self._ended = service, ended

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Shut down in order at the first of these signals, and then raise it again; ignored ones stay ignored."""
        handled = [number for number in ENDING if signal.getsignal(number) is not signal.SIG_IGN]
        before = {number: signal.signal(number, self.handle_exit) for number in handled}
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
    """A connection that is closed if the head of a request takes too long or grows too large."""

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
        """Send the error in the API's format."""
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
