"""Runs the service in this process until it is told to stop, and cuts off connections that send nothing."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from types import FrameType

import uvicorn
from fastapi import FastAPI
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from paceline.files import allow_open
from paceline.serve.middleware import BODY_BYTES
from paceline.serve.service import Service

HEADER_BYTES = 64 * 1024
HEADER_SECONDS = 10.0
KEEP_ALIVE = 75  # seconds that a worker's connection may rest between two rounds
BACKLOG = 2048
ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
GRACE = 3  # seconds that requests under way have when the service stops


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
        timeout_keep_alive=KEEP_ALIVE,
        timeout_graceful_shutdown=GRACE,
        backlog=BACKLOG,
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
        before = {number: signal.getsignal(number) for number in ENDING}
        before = {number: handler for number, handler in before.items() if handler is not signal.SIG_IGN}
        for number in before:
            signal.signal(number, self.handle_exit)
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
