"""Services for tests: in this process without a network, or a real one in a process of its own."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from support import forks

TOKEN = "token-of-the-tests-0123"
# Signals that the process of the tests ignores, whoever started it, are not ignored there.
STARTER = """
import resource, runpy, signal, sys
ignored, files = eval(sys.argv[1])
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
    usual = signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
    signal.signal(number, signal.SIG_IGN if number in ignored else usual)
if files:
    resource.setrlimit(resource.RLIMIT_NOFILE, (files, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
del sys.argv[:2]
sys.argv.insert(0, "paceline")
runpy.run_module("paceline", run_name="__main__", alter_sys=True)
"""


class Answer(NamedTuple):
    """Status and content."""

    status: int
    content: Any


class Process:
    """``paceline serve`` as a user starts it, in a fork. files: open ones that it is allowed at first."""

    def __init__(
        self,
        directory: Path,
        *options: object,
        port: int = 0,
        ignored: Iterable[int] = (),
        files: int = 0,
        **environment: str,
    ) -> None:
        self.directory, self._options = directory, [*map(str, options)]
        self._begin = repr(([*map(int, ignored)], files))
        self._environment = os.environ | {"PACELINE_TOKEN": TOKEN, "OMP_NUM_THREADS": "1"} | environment
        self.port = port
        self.last = ""  # what it complained of, once it has ended
        self.start()

    def start(self) -> None:
        """Start it (again, on the same port)."""
        command = ["serve", "--dir", str(self.directory), "--port", str(self.port), *self._options]
        with forks.warm():
            self.process = subprocess.Popen(
                [sys.executable, "-c", STARTER, self._begin, *command],
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
        status = self.process.wait(400)
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
