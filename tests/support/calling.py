"""A service in this process, without a network: a test plays a scenario against it."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from typing import Any

import httpx

from paceline import tokens
from paceline.serve.app import make
from paceline.serve.service import Service
from support.served import TOKEN

JOB = {"batch": 12, "workers": 2, "policy": "equal", "floor": 1.0, "first": 5.0}


class Clock:
    """Seconds as the test says."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


class Caller:
    """Speaks to an app in this process."""

    def __init__(self, service: Service, http: httpx.AsyncClient, clock: Clock) -> None:
        self.service, self.http, self.clock = service, http, clock
        self.secrets: dict[str, str] = {}

    async def ask(self, method: str, path: str, body: Any = None, **options: Any) -> tuple[int, Any]:
        headers = {"Authorization": f"Bearer {TOKEN}", "Content-Type": "application/json"}
        headers |= options.pop("headers", {})
        content = body if isinstance(body, bytes) or body is None else json.dumps(body)
        answer = await self.http.request(method, f"/v1{path}", content=content, headers=headers, **options)
        return answer.status_code, answer.json() if answer.content else None

    async def join(self, name: str, job: str = "j", **more: Any) -> tuple[int, Any]:
        status, joined = await self.ask("POST", f"/jobs/{job}/workers", {"name": name} | more)
        self.secrets[name] = joined.get("secret", "")
        return status, joined

    async def next(self, name: str, wait: float = 0.0, job: str = "j") -> tuple[int, Any]:
        headers = {"X-Worker-Secret": self.secrets.get(name, "")}
        return await self.ask("GET", f"/jobs/{job}/workers/{name}/next?wait={wait}", headers=headers)

    async def report(
        self, name: str, body: Any, wait: float = 0.0, secret: str | None = None, job: str = "j"
    ) -> tuple[int, Any]:
        headers = {"X-Worker-Secret": self.secrets[name] if secret is None else secret}
        path = f"/jobs/{job}/workers/{name}/reports?wait={wait}"
        return await self.ask("POST", path, body, headers=headers)


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


Scenario = Callable[[Caller], Coroutine[Any, Any, None]]


def play(directory: Path, scenario: Scenario, floor: float = 1.0, **options: Any) -> None:
    """Plays a scenario against a service with one job and its two workers."""

    async def all_of_it() -> None:
        async with serving(directory, **options) as call:
            assert (await call.ask("PUT", "/jobs/j", JOB | {"floor": floor}))[0] == 201
            for name in "ab":
                assert (await call.join(name))[0] == 201
            await scenario(call)

    asyncio.run(all_of_it())


def refused(answer: tuple[int, Any], status: int, words: str) -> None:
    """One sentence under "error", and nothing else."""
    assert answer[0] == status, answer
    assert list(answer[1]) == ["error"]
    assert words in answer[1]["error"]
    assert "\n" not in answer[1]["error"]
