"""A server of the page in a thread, and a real browser."""

import threading
import time
from contextlib import contextmanager

import pytest

from support import browsers


class Watched:
    """A run's page, served; ``stop`` and ``start`` again at the same address."""

    def __init__(self, run_dir):
        from paceline.cli.watch import listen, make_server

        self._listen, self._make, self._run_dir = listen, make_server, run_dir
        self.port = 0
        self.start()

    def start(self):
        listener = self._listen("127.0.0.1", self.port)
        self.port = listener.getsockname()[1]
        self._server = self._make(self._run_dir, "127.0.0.1")
        self._thread = threading.Thread(target=self._server.run, kwargs={"sockets": [listener]}, daemon=True)
        self._thread.start()

    def stop(self):
        self._server.should_exit = True
        self._thread.join(400)
        assert not self._thread.is_alive()

    @property
    def url(self):
        return f"http://127.0.0.1:{self.port}/"


@pytest.fixture(autouse=True)
def patient(monkeypatch):
    """A busy machine does not make a run look silent, or its record half read."""
    monkeypatch.setattr("paceline.live.panel.QUIET", 600.0)
    monkeypatch.setattr("paceline.live.pages.READING", 600.0)


@pytest.fixture
def watched():
    """Serves the pages of run directories."""
    servers = []

    def watch(run_dir):
        servers.append(Watched(run_dir))
        return servers[-1]

    yield watch
    for server in servers:
        server.stop()


@pytest.fixture(scope="module")  # its event loop must not be there when another module's tests run theirs
def chromium():
    with browsers.chromium() as browser:
        yield browser


@pytest.fixture
def tab(chromium):
    """Opens pages; at the end none may have complained, or asked another host for anything."""
    contexts = []

    def open_(url, width=1280, height=900, scheme="light", may_lose=False):
        context = chromium.new_context(viewport={"width": width, "height": height}, color_scheme=scheme)
        page = browsers.opened(context)
        page.complaints, page.asked = [], []
        page.on("console", lambda said: said.type == "error" and page.complaints.append(said.text))
        page.on("pageerror", lambda error: page.complaints.append(str(error)))
        page.on("request", lambda request: page.asked.append(request.url))
        contexts.append((context, page, url, may_lose))
        page.goto(url)
        return page

    yield open_
    for context, page, url, may_lose in contexts:
        base = url.split("#")[0]
        strange = [asked for asked in page.asked if not asked.startswith((base, "data:"))]
        assert strange == []
        assert [
            text for text in page.complaints if not (may_lose and "Failed to load resource" in text)
        ] == []
        context.close()


@contextmanager
def soon(seconds=60):
    """A deadline for loops that wait."""
    end = time.monotonic() + seconds
    yield lambda: time.monotonic() < end
