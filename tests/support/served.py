"""Services for tests: in this process without a network, or a real one in a process of its own."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import urllib.error
import urllib.request
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from support.signals import ignoring

TOKEN = "token-of-the-tests-0123"


class Answer(NamedTuple):
    """Status and content."""

    status: int
    content: Any


class Process:
    """``paceline serve`` as a user starts it."""

    def __init__(
        self,
        directory: Path,
        *options: object,
        port: int = 0,
        ignored: Iterable[int] = (),
        **environment: str,
    ) -> None:
        self.directory, self._options, self._ignored = directory, [*map(str, options)], ignored
        self._environment = os.environ | {"PACELINE_TOKEN": TOKEN, "OMP_NUM_THREADS": "1"} | environment
        self.port = port
        self.last = ""  # what it complained of, once it has ended
        self.start()

    def start(self) -> None:
        """Start it (again, on the same port)."""
        command = ["-m", "paceline", "serve", "--dir", str(self.directory), "--port", str(self.port)]
        self.process = subprocess.Popen(
            # Signals that this process ignores, whoever started it, are not ignored there.
            ignoring(self._ignored, *command, *self._options),
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=self._environment,
        )  # fmt: skip
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line.startswith("paceline serves at "), line + (self.process.stderr.read() if not line else "")  # type: ignore[union-attr]
        self.url = line.split(" at ")[1].split()[0]
        self.port = int(self.url.rsplit(":", 1)[1])

    def end(self, how: int = signal.SIGTERM) -> int:
        """End it; its exit status."""
        self.process.send_signal(how)
        status = self.process.wait(180)
        self.last = self.process.stderr.read()  # type: ignore[union-attr]
        for stream in (self.process.stdout, self.process.stderr):
            stream.close()  # type: ignore[union-attr]
        return status

    def ask(
        self, method: str, path: str, body: Any = None, secret: str = "", token: str | None = TOKEN
    ) -> Answer:
        """One request."""
        headers = {"Content-Type": "application/json", "X-Worker-Secret": secret}
        if token is not None:
            headers["Authorization"] = f"Bearer {token}"
        data = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, headers, method=method)
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                return Answer(answer.status, _content(answer.read()))
        except urllib.error.HTTPError as error:
            return Answer(error.code, _content(error.read()))


def _content(data: bytes) -> Any:
    try:
        return json.loads(data) if data else None
    except ValueError:
        return data.decode()


@contextlib.contextmanager
def process(directory: Path, *options: object, **more: Any) -> Iterator[Process]:
    """A service that is gone at the end, whatever happens."""
    running = Process(directory, *options, **more)
    try:
        yield running
    finally:
        if running.process.poll() is None:
            running.end(signal.SIGKILL)
