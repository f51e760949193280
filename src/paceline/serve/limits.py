"""What a client may ask of the service: a bounded body, sent within bounded time, and with the token.

Whoever exceeds that is answered (or, before its request has even begun, cut off) and nothing more is kept.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import urllib.parse
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from paceline import tokens
from paceline.serve.page import asks_token

BODY_BYTES = 256 * 1024
HEADER_BYTES = 64 * 1024
BODY_SECONDS = 10.0
HEADER_SECONDS = 10.0
LINGER_SECONDS = 2.0  # for which a client that was refused may go on sending
OPEN = ("/openapi.json", "/docs")  # say nothing of any job
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Message, Receive, Send], Awaitable[None]]


FORM = [  # headers of the page that asks for the token
    (
        b"content-security-policy",
        b"default-src 'none'; style-src 'unsafe-inline'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'",
    ),
    (b"referrer-policy", b"no-referrer"),
    (b"x-content-type-options", b"nosniff"),
    (b"cache-control", b"no-store"),
]


class Bounded:
    """ASGI middleware: the app behind it gets whole bodies, and requests that may be made.

    token: the digest of the service's; None lets everybody in.
    """

    def __init__(self, app: App, token: str | None, seconds: float = BODY_SECONDS) -> None:
        self.app, self.token, self.seconds = app, token, seconds

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        if not self._admitted(scope, headers):
            challenge = [(b"www-authenticate", b"Bearer")]
            if scope["method"] == "GET" and _page(scope) and b"text/html" in headers.get(b"accept", b""):
                await refuse(send, 401, "", [*challenge, *FORM], asks_token())
                return
            await refuse(
                send,
                401,
                "the token is missing or wrong: send the header Authorization: Bearer TOKEN",
                challenge,
                unread=receive,
            )
            return
        if self.token is None and not _local(headers.get(b"host", b"")):
            # A page in a browser could reach this address under a name of its own.
            await refuse(
                send,
                403,
                "without a token the service answers to localhost alone: use that name",
                unread=receive,
            )
            return
        length = headers.get(b"content-length", b"0")
        if length == b"0" and b"transfer-encoding" not in headers:
            await self.app(scope, receive, send)
            return
        try:
            async with asyncio.timeout(self.seconds):
                body = await _whole(receive, length)
        except TimeoutError:
            await refuse(
                send,
                408,
                f"the body did not arrive within {self.seconds:g} s: send it at once",
                unread=receive,
            )
            return
        if body is None:
            await refuse(
                send, 413, f"the body is too large: expected {BODY_BYTES} bytes at most", unread=receive
            )
            return
        kind = headers.get(b"content-type", b"").partition(b";")[0].strip().lower()
        if body and kind != b"application/json":
            # Nor can such a page send this type without asking first.
            await refuse(
                send, 415, "the body is of another type: send the header Content-Type: application/json"
            )
            return
        whole = {"type": "http.request", "body": body, "more_body": False}
        await self.app(scope, before(whole, receive), send)

    def _admitted(self, scope: Message, headers: dict[bytes, bytes]) -> bool:
        if self.token is None or scope["path"] in OPEN:
            return True
        scheme, _, given = headers.get(b"authorization", b"").partition(b" ")
        if scheme.lower() == b"bearer" and tokens.matches(given.strip().decode("latin-1"), self.token):
            return True
        # A browser sends no such header: for its pages the token stands in their address.
        if not _page(scope):
            return False
        query = urllib.parse.parse_qs(scope["query_string"].decode("latin-1"))
        return tokens.matches(query.get("token", [""])[0], self.token)


def _page(scope: Message) -> bool:
    """Whether it is one of the pages for people."""
    return bool(scope["path"] == "/" or scope["path"].startswith("/jobs/"))


def _local(host: bytes) -> bool:
    """Whether a Host header names this machine, with or without a port."""
    name = host.rsplit(b":", 1)[0] if not host.endswith(b"]") else host
    return name.lower() in (b"localhost", b"127.0.0.1", b"[::1]")


def before(message: Message, receive: Receive) -> Receive:
    """This message, which was read already, then what follows."""
    first = True

    async def replay() -> Message:
        nonlocal first
        if first:
            first = False
            return message
        return await receive()

    return replay


async def _whole(receive: Receive, length: bytes) -> bytes | None:
    """The body; None where it is too large, or its header says so."""
    if not length.isdigit() or int(length[:20]) > BODY_BYTES:
        return None
    parts: list[bytes] = []
    size, more = 0, True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            return None  # nobody is there to read the answer
        part = message.get("body", b"")
        parts.append(part)
        size, more = size + len(part), message.get("more_body", False)
        if size > BODY_BYTES:
            return None
    return b"".join(parts)


async def refuse(
    send: Send,
    status: int,
    sentence: str,
    headers: list[tuple[bytes, bytes]] | None = None,
    html: str = "",
    unread: Receive | None = None,
) -> None:
    """Answer with an error, and close the connection: what the client may still be sending is not kept.

    html: a page for people, instead of the sentence. unread: where the rest of the body would come from. For a while
        it is thrown away: a client whose connection is closed while it sends sees that, and not the answer.
    """
    body = html.encode() if html else json.dumps({"error": sentence}).encode()
    start = {
        "type": "http.response.start",
        "status": status,
        "headers": [
            (b"content-type", b"text/html; charset=utf-8" if html else b"application/json"),
            (b"content-length", str(len(body)).encode()),
            (b"connection", b"close"),
            *(headers or []),
        ],
    }
    await send(start)
    if unread is not None:
        await send({"type": "http.response.body", "body": body, "more_body": True})
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LINGER_SECONDS):
                while (await unread()).get("more_body", False):
                    pass
        body = b""
    await send({"type": "http.response.body", "body": body})


class Impatient(HttpToolsProtocol):
    """A connection that is cut off when its request's head takes too long or grows too large."""

    _patience: asyncio.TimerHandle | None = None
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
        if self._patience is None:
            self._await_head()

    def on_headers_complete(self) -> None:
        self._head_is_there()
        super().on_headers_complete()

    def send_400_response(self, msg: str) -> None:
        """In the API's terms."""
        body = json.dumps({"error": msg.rstrip(".")}).encode()
        self.transport.write(
            b"HTTP/1.1 400 Bad Request\r\ncontent-type: application/json\r\ncontent-length: "
            + str(len(body)).encode()
            + b"\r\nconnection: close\r\n\r\n"
            + body
        )
        self.transport.close()

    def _await_head(self) -> None:
        self._head = 0
        self._patience = self.loop.call_later(HEADER_SECONDS, self._cut_off)

    def _head_is_there(self) -> None:
        self._head = -1
        if self._patience is not None:
            self._patience.cancel()
            self._patience = None

    def _cut_off(self) -> None:
        self._patience = None
        if not self.transport.is_closing():
            self.transport.close()
