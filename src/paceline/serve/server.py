"""Runs the service in this process until it is told to stop."""

from __future__ import annotations

import contextlib
import gc
import signal
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

import uvicorn
from fastapi import FastAPI

from paceline.errors import PacelineError
from paceline.files import allow_open
from paceline.serve.limits import Impatient
from paceline.serve.service import Service

KEEP_ALIVE = 75  # seconds that a worker's connection may rest between two rounds
BACKLOG = 2048
ENDING = tuple(getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name))
GRACE = 3  # seconds that requests under way have when the service stops


def url(listening: socket.socket) -> str:
    """Where a client on this machine finds it."""
    host, port = listening.getsockname()[:2]
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def run(app: FastAPI, service: Service, listening: socket.socket) -> None:
    """Serve until SIGINT, SIGTERM or SIGHUP, as far as they are not ignored."""
    config = uvicorn.Config(
        app,
        http=Impatient,
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
    _Server(config, service).run(sockets=[listening])


class _Server(uvicorn.Server):
    """Lets go of those who wait for a plan as soon as it is told to stop."""

    def __init__(self, config: uvicorn.Config, service: Service) -> None:
        super().__init__(config)
        self._service = service

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Ends in order at the first of these signals, and then passes it on; one that is ignored stays so."""
        before = {number: signal.getsignal(number) for number in ENDING}
        before = {number: handler for number, handler in before.items() if handler is not signal.SIG_IGN}
        for number in before:
            signal.signal(number, self.handle_exit)
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


def state_directory(path: Path) -> Path:
    """The directory, made where there is none, for its owner alone."""
    try:
        path.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError as error:
        raise PacelineError(f"cannot make {path}: {error.strerror}; choose another --dir") from error
    return path
