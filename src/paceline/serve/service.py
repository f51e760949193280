"""The jobs of one service: every call is on disk before it is answered, and a restart goes on from there.

Calls are taken in one at a time, by the event loop; each is applied to its job and added to the log, and its
answer waits for the log. Should the log fail, memory goes back to what is on disk, and all who wait are told that
nothing has changed: no plan ever leaves that a restart would not make again.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from paceline.client import Part
from paceline.errors import PacelineError
from paceline.serve import tokens
from paceline.serve.effects import Closed, Effect, Joined, Left, Report
from paceline.serve.jobs import Job
from paceline.serve.recording import Record
from paceline.serve.refusals import Conflict, Stored, Unknown
from paceline.serve.settings import Settings
from paceline.serve.store import Kept, Store

MOST_JOBS = 100
STATE, RUNS = "service.sqlite", "runs"
TICK = 0.2  # seconds between two looks at the deadlines
PAUSE = 1.0  # seconds for which a store that failed is left alone
CALLS = 1000  # calls after which a job's whole state is stored, and
CALLS_PER_WORKER = 8
Observer = Callable[[str, Effect], None]


class Served:
    """A job and what a service needs around it."""

    def __init__(self, kept: Kept, record: Record | None) -> None:
        self.name, self.record = kept.name, record
        self.job = Job(Settings.from_dict(kept.settings))
        self.newest = 0.0  # the time of the newest call
        if kept.state is not None:
            self.newest = kept.state["now"]
            self.job.load_state_dict(kept.state["job"])
        self.number, self.stored = kept.through, kept.through  # the newest call, and the newest stored state
        self.waiters: set[asyncio.Future[None]] = set()
        self.behind: list[Closed] = []  # rounds that closed while calls were replayed
        self.broken = False
        for call in kept.calls:
            self.number, self.newest = self.number + 1, call[1]
            self.behind += [each for each in carry_out(self.job, call) if isinstance(each, Closed)]

    def state(self) -> dict[str, Any]:
        """What ``Kept.state`` is to be."""
        return {"now": self.newest, "job": self.job.state_dict()}

    def wake(self) -> None:
        """Let those who wait for a plan look again."""
        waiters, self.waiters = self.waiters, set()
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)


def carry_out(job: Job, call: list[Any]) -> list[Effect]:
    """Apply a call as it stands in the log."""
    name, now, *arguments = call
    if name == "ask":
        return job.ask(now, *arguments)[1]
    if name == "report":
        return job.report(now, arguments[0], Report(*arguments[1]))
    effects: list[Effect] = getattr(job, name)(now, *arguments)
    return effects


class Service:
    """Opens the state in a directory. Call ``start`` and ``stop`` in the event loop, ``tick`` now and then.

    record: whether each job leaves a run directory. sync: whether a commit is forced to the disk.
    clock: seconds that never go back.
    """

    def __init__(
        self,
        directory: Path,
        *,
        record: bool = True,
        sync: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.runs = directory / RUNS
        self.store = Store(directory / STATE, sync, self._failed)
        self.observers: list[Observer] = []
        self.stopping = False
        self._recording, self._clock = record, clock
        self._records: dict[str, Record] = {}
        self._refuse_until, self._trouble = 0.0, ""
        self.jobs: dict[str, Served] = {}
        self._load()
        # The jobs' time stands still while the service is away.
        self._offset = max((served.newest for served in self.jobs.values()), default=0.0) - clock()

    def now(self) -> float:
        """Seconds that services on this state have run."""
        return self._clock() + self._offset

    async def start(self) -> None:
        """Take the jobs up again."""
        for served in self.jobs.values():
            if served.number:
                with contextlib.suppress(Stored):  # with a full disk, requests will be told
                    self._log(served, "resume", [])
                    await self.store.durable()

    async def stop(self) -> None:
        """Let go of all who wait, and of the files."""
        self.release()
        await self.store.close()
        for record in self._records.values():
            record.close()

    def release(self) -> None:
        """Answer all who wait that the service stops. Safe in a signal handler of the event loop's thread."""
        self.stopping = True
        for served in self.jobs.values():
            served.wake()

    def present(self, name: str, settings: Settings) -> Served | None:
        """The job of this name where there is one. Raises Conflict where it has other settings."""
        present = self.jobs.get(name)
        if present is not None and present.job.settings != settings:
            raise Conflict(
                f"job {name!r} exists with other settings: choose another name, or delete it first"
            )
        return present

    def create(self, name: str, settings: Settings) -> tuple[Served, bool]:
        """The job of this name, and whether it is new. Raises Conflict where it has other settings."""
        present = self.present(name, settings)
        if present is not None:
            return present, False
        self._writable()
        if len(self.jobs) >= MOST_JOBS:
            raise Conflict(f"there are {MOST_JOBS} jobs: delete one first")
        self.store.create(name, settings.to_dict())
        served = self.jobs[name] = self._served(Kept(name, settings.to_dict(), None, 0, []))
        return served, True

    def delete(self, name: str) -> None:
        """End a job; its record stays."""
        served = self.served(name)
        self._writable()
        self.store.delete(name)
        del self.jobs[name]
        served.wake()
        record = self._records.pop(name, None)
        if record is not None:
            self.store.then(record.finish)
            self.store.then(record.close)

    def served(self, name: str) -> Served:
        """The job of this name; raises Unknown."""
        served = self.jobs.get(name)
        if served is None:
            known = ", ".join(list(self.jobs)[:5]) or "none"
            raise Unknown(f"job {name!r} is unknown here: create it first (there are: {known})")
        return served

    async def join(self, job: str, name: str, secret: str | None, place: int | None) -> tuple[Joined, str]:
        """A worker joins; returns its place and its secret."""
        served = self.served(job)
        chosen = tokens.fresh() if secret is None else secret
        effects = self._log(served, "join", [name, tokens.digest(chosen), place])
        await self.store.durable()
        return next(each for each in effects if isinstance(each, Joined)), chosen

    async def report(self, job: str, name: str, secret: str, report: Report) -> None:
        """A worker reports."""
        served = self._known(job, name, secret)
        if served.job.closing and served.number - served.stored >= max(
            CALLS, CALLS_PER_WORKER * served.job.settings.workers
        ):
            # Just before a decision: one that is made aside is ready by now, and nothing waits for it.
            self.store.state(job, served.number, served.state())
            served.stored = served.number
        if served.job.members.here(name).last != report:
            self._log(served, "report", [name, list(report)])
        await self.store.durable()

    async def leave(self, job: str, name: str, secret: str) -> None:
        """A worker leaves."""
        self._log(self._known(job, name, secret), "leave", [name])
        await self.store.durable()

    async def next(self, job: str, name: str, secret: str, wait: float) -> Part | str:
        """The worker's part of its next round, after at most ``wait`` seconds; else what it waits for."""
        until = self._clock() + wait
        while True:
            served = self._known(job, name, secret)
            now = self.now()
            part, effects = served.job.ask(now, name)
            if effects:
                self._writable()
                self._logged(served, ["ask", now, name], effects)
            if part is not None:
                await self.store.durable()
                return part
            left = until - self._clock()
            if left <= 0 or self.stopping:
                return "the service is stopping" if self.stopping else served.job.waiting_for()
            waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            served.waiters.add(waiter)
            try:
                await asyncio.wait_for(waiter, left)
            except TimeoutError:
                pass
            finally:
                served.waiters.discard(waiter)

    def tick(self) -> None:
        """Drop the silent."""
        if self._clock() < self._refuse_until:
            return
        for served in [each for each in self.jobs.values() if not each.broken]:
            for name in served.job.silent(self.now()):
                self._log(served, "drop", [name])

    def _known(self, job: str, name: str, secret: str) -> Served:
        served = self.served(job)
        served.job.members.known(name, secret)
        if served.broken:
            raise Stored(f"job {job!r} is being restored after an error: try again")
        return served

    def _writable(self) -> None:
        if self._clock() < self._refuse_until:
            raise Stored(self._trouble)

    def _log(self, served: Served, name: str, arguments: list[Any]) -> list[Effect]:
        """Call a job and log it."""
        self._writable()
        call = [name, self.now(), *arguments]
        try:
            effects = carry_out(served.job, call)
        except PacelineError:
            raise
        except Exception:
            served.broken = True  # whatever went half-way must not be built upon
            self._restoring = asyncio.create_task(self._restore(served))
            raise
        self._logged(served, call, effects)
        return effects

    def _logged(self, served: Served, call: list[Any], effects: list[Effect]) -> None:
        served.number, served.newest = served.number + 1, call[1]
        self.store.call(served.name, served.number, call)
        if served.job.may_settle() or any(isinstance(each, Left) for each in effects):
            served.wake()
        for effect in effects:
            for observe in self.observers:
                observe(served.name, effect)
            if served.record is not None and isinstance(effect, Closed):
                self.store.then(functools.partial(served.record.write, effect))
        if served.record is not None and not served.job.members.count:
            self.store.then(served.record.finish)

    def _load(self) -> None:
        """All jobs as they are on disk."""
        before = self.jobs
        self.jobs = {kept.name: self._served(kept) for kept in self.store.read()}
        for served in before.values():
            served.wake()

    def _served(self, kept: Kept) -> Served:
        record, new = self._records.get(kept.name), False
        if record is None and self._recording:
            settings = Settings.from_dict(kept.settings)
            record = self._records[kept.name] = Record(self.runs / kept.name, kept.name, settings)
            new = True
        served = Served(kept, record)
        if record is not None:
            if new:
                self.store.then(functools.partial(record.open, served.job.settled))
            for closed in served.behind:
                self.store.then(functools.partial(record.write, closed))
        return served

    async def _restore(self, served: Served) -> None:
        """Put a job back to what is on disk."""
        with contextlib.suppress(Stored):
            await self.store.durable()
        for kept in self.store.read():
            if kept.name == served.name and self.jobs.get(kept.name) is served:
                self.jobs[kept.name] = self._served(kept)
        served.wake()

    def _failed(self, sentence: str) -> None:
        """The log could not be written: memory goes back to what is on disk."""
        self._refuse_until, self._trouble = self._clock() + PAUSE, sentence
        self._load()
