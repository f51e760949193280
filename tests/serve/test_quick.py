"""The two requests of every round are answered as FastAPI answers them, and in its place where they are right."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fastapi")

from starlette.responses import JSONResponse

from paceline.serve import server
from support.calling import GOOD, KEY, Caller, serving

pytestmark = pytest.mark.anyio
SECRETS = {name: f"the-secret-of-worker-{name}" for name in "ab"}
REQUESTS: list[tuple[str, str, Any, str]] = [  # method, path below the workers, body, secret
    ("GET", "/a/next?wait=0", None, "a"),
    ("GET", "/a/next?wait=0", None, "b"),
    ("GET", "/a/next?wait=-1", None, "a"),
    ("GET", "/a/next?wait=61", None, "a"),
    ("GET", "/a/next?wait=nan", None, "a"),
    ("GET", "/a/next?wait=0&wait=1", None, "a"),
    ("GET", "/nobody/next?wait=0", None, "a"),
    ("GET", "/.a/next?wait=0", None, "a"),
    ("HEAD", "/a/next", None, "a"),
    ("DELETE", "/a/next", None, "a"),
    ("GET", "/a/reports", None, "a"),
    ("POST", "/a/reports", GOOD | {"samples": -1}, "a"),
    ("POST", "/a/reports", GOOD | {"samples": "6"}, "a"),
    ("POST", "/a/reports", GOOD | {"samples": 6.0}, "a"),
    ("POST", "/a/reports", GOOD | {"seconds": True}, "a"),
    ("POST", "/a/reports", GOOD | {"more": 1}, "a"),
    ("POST", "/a/reports", {"round": 0}, "a"),
    ("POST", "/a/reports", [], "a"),
    ("POST", "/a/reports", b'{"round": 0, "samples": 6, "seconds": NaN}', "a"),
    ("POST", "/a/reports", b'{"round": 0, "samples": 6, "seconds": 1e999}', "a"),
    ("POST", "/a/reports", b'{"round": 0, "samples": 6, "seconds": 1.0', "a"),
    ("POST", "/a/reports", b"[" * 100_000, "a"),
    ("POST", "/a/reports", b"\xff", "a"),
    ("POST", "/a/reports", b"", "a"),
    ("POST", "/a/reports", GOOD, "b"),
    ("POST", "/a/reports", GOOD | {"round": 5}, "a"),
    ("POST", "/a/reports?wait=x", GOOD, "a"),
    ("POST", "/a/reports", GOOD, "a"),
    ("POST", "/a/reports", GOOD, "a"),
    ("POST", "/b/reports?wait=0", GOOD | {"cpu": 0.5, "memory": 1}, "b"),
    ("GET", "/a/next", None, "a"),
    ("GET", "/b/next?wait=0.5", None, "b"),
]


async def joined(call: Caller) -> None:
    await call.create("j", "")
    for name in "ab":
        assert (await call.join(name, secret=SECRETS[name]))[0] == 201


async def answers(directory: Path) -> list[tuple[int, str, Any]]:
    """Status, type and body of the answer to each request, and what the service's metrics counted of them."""
    found: list[tuple[int, str, Any]] = []
    async with serving(directory) as call:
        await joined(call)
        for method, path, body, who in REQUESTS:
            headers = {"X-Worker-Secret": SECRETS[who]}
            status, said = await call.ask(method, f"/jobs/j/workers{path}", body, headers=headers)
            found.append((status, f"{method} {path}", said))
        counted = await call.page("/metrics")
        found += [(0, line, None) for line in counted.splitlines() if "_count{route=" in line]
    return found


async def test_answers_are_those_of_fastapi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(server, "_PATH", re.compile("(?!)"))
        slow = await answers(tmp_path / "slow")
    sent: list[int] = []

    def noted(said: Any, status: int = 200, *headers: Any) -> JSONResponse:
        sent.append(status)
        return JSONResponse(said, status, *headers)

    monkeypatch.setattr(server, "JSONResponse", noted)
    assert await answers(tmp_path / "quick") == slow
    statuses = [status for status, *_ in slow]
    assert {200, 400, 403, 404, 405, 409, 422} <= set(statuses)
    assert sum("answer_seconds_count" in line for _, line, _ in slow) >= 3, "the metrics"
    assert sent.count(200) >= 6
    assert len(sent) < len(REQUESTS) - 12, "mistakes are FastAPI's to tell"


@pytest.mark.parametrize("ask", ["wait=0", "wait=0.0000000000"])  # too long a number for the short way
async def test_of_two_secrets_the_first_counts(tmp_path: Path, ask: str) -> None:
    async with serving(tmp_path) as call:
        await joined(call)
        for order, status in (("ab", 200), ("ba", 403)):
            headers = [*KEY.items(), *(("X-Worker-Secret", SECRETS[each]) for each in order)]
            answer = await call.http.get(f"/v1/jobs/j/workers/a/next?{ask}", headers=headers)
            assert answer.status_code == status
