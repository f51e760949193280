"""A service in this process, without a network, and who speaks to it."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx

from paceline import tokens
from paceline.serve.app import make
from paceline.serve.service import Service
from support.served import TOKEN

JOB = {"batch": 12, "workers": 2, "policy": "equal", "grace": 1.0, "first": 5.0}
GOOD = {"round": 0, "samples": 6, "seconds": 1.0}  # a report of half of the job's batch
KEY = {"Authorization": f"Bearer {TOKEN}"}


class Clock:
    """Seconds as the test says."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


class Caller:
    """Speaks to an app in this process. secrets: of each worker, by its job and its name."""

    def __init__(self, service: Service, http: httpx.AsyncClient, clock: Clock) -> None:
        self.service, self.http, self.clock = service, http, clock
        self.secrets: dict[tuple[str, str], str] = {}

    async def ask(self, method: str, path: str, body: Any = None, **options: Any) -> tuple[int, Any]:
        headers = KEY | {"Content-Type": "application/json"} | options.pop("headers", {})
        content = body if isinstance(body, bytes) or body is None else json.dumps(body)
        answer = await self.http.request(method, f"/v1{path}", content=content, headers=headers, **options)
        return answer.status_code, answer.json() if answer.content else None

    async def asks(
        self, name: str, job: str, method: str, path: str, body: Any = None, secret: str | None = None
    ) -> tuple[int, Any]:
        """A request of this worker, with its secret if no other is given."""
        headers = {"X-Worker-Secret": self.secrets.get((job, name), "") if secret is None else secret}
        return await self.ask(method, f"/jobs/{job}/workers/{name}{path}", body, headers=headers)

    async def join(self, name: str, job: str = "j", **more: Any) -> tuple[int, Any]:
        status, joined = await self.ask("POST", f"/jobs/{job}/workers", {"name": name} | more)
        self.secrets[job, name] = joined.get("secret", "")
        return status, joined

    async def create(self, job: str, names: str = "ab", **changes: Any) -> None:
        """A job, and workers that join it."""
        assert (await self.ask("PUT", f"/jobs/{job}", JOB | changes))[0] == 201
        for name in names:
            assert (await self.join(name, job))[0] == 201

    async def next(self, name: str, wait: float = 0.0, job: str = "j") -> tuple[int, Any]:
        return await self.asks(name, job, "GET", f"/next?wait={wait}")

    async def report(
        self, name: str, body: Any, secret: str | None = None, job: str = "j"
    ) -> tuple[int, Any]:
        return await self.asks(name, job, "POST", "/reports?wait=0", body, secret)

    async def leave(self, name: str, job: str = "j") -> tuple[int, Any]:
        return await self.asks(name, job, "DELETE", "")

    async def rounds(
        self, *numbers: int, names: str = "ab", job: str = "j", after: float = 0.0, **changes: Any
    ) -> None:
        """These rounds, in which all ask first, and report so many seconds later."""
        for number in numbers:
            for name in names:
                assert (await self.next(name, job=job))[0] == 200
            self.clock.now += after
            for name in names:
                assert (await self.report(name, GOOD | changes | {"round": number}, job=job))[0] == 200

    async def state(self, job: str = "j") -> Any:
        return (await self.ask("GET", f"/jobs/{job}"))[1]

    async def page(self, path: str) -> str:
        """What a user sees who has the token."""
        answer = await self.http.get(path, headers=KEY)
        assert answer.status_code == 200
        return answer.text


@contextlib.asynccontextmanager
async def serving(directory: Path, token: str | None = TOKEN, **options: Any) -> AsyncIterator[Caller]:
    clock = Clock()
    directory.mkdir(exist_ok=True)
    service = Service(directory, clock=clock, **options)
    app = make(service, token and tokens.digest(token), body_seconds=0.2)
    async with app.router.lifespan_context(app):
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost:7070") as http:
            yield Caller(service, http, clock)


@contextlib.asynccontextmanager
async def playing(directory: Path, grace: float = 1.0, **options: Any) -> AsyncIterator[Caller]:
    """Beside a service with one job and its two workers."""
    async with serving(directory, **options) as call:
        await call.create("j", grace=grace)
        yield call


def refused(answer: tuple[int, Any], status: int, words: str) -> None:
    """One sentence under "error", and nothing else."""
    assert answer[0] == status, answer
    assert list(answer[1]) == ["error"]
    assert words in answer[1]["error"]
    assert "\n" not in answer[1]["error"]
