"""The operations of a service: create and delete jobs; join, report, get a part and leave; drop silent workers.

Changes of a job are made in memory and written to its log in the same order. Every answer (a plan, a refusal or
figures) waits until all changes of the job so far are on disk. If writing the log fails, all waiting requests
get an error and the job is read again from the disk, as if none of these changes had happened. So a restart
continues from a state that agrees with all answers.
"""

from __future__ import annotations

import asyncio
import bisect
import contextlib
import functools
import logging
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any, TypeVar

import paceline
from paceline import tokens
from paceline.client import Part
from paceline.errors import PacelineError
from paceline.rounds import RoundResult
from paceline.serve import events
from paceline.serve import store as stored
from paceline.serve.catalog import SPANS, Catalog, JobRuntime
from paceline.serve.models import Lengths, Settings, Waiting
from paceline.serve.store import Store, StoredJob

STATE, RUNS = "service.sqlite", "runs"
TICK = 0.2  # seconds between two checks of the deadlines
PAUSE = 1.0  # seconds without writes after the store failed
CALLS = 1000  # calls after which a job's whole state is stored, if these are more than
CALLS_PER_WORKER = 8
T = TypeVar("T")
_log = logging.getLogger(__name__)


class Service:
    """A service on the state in a directory. Call ``start`` and ``stop`` in the event loop, and ``tick`` regularly.

    record: whether each job writes a run directory. sync: whether a commit is forced to the disk.
    clock: monotonic seconds.
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
        self.store = Store(directory / STATE, sync, self.failed)
        self.catalog = Catalog(self.store, self.runs if record else None)
        self.trouble = ""  # why nothing can be stored at present
        self._refuse_until = 0.0
        self.stopping = False
        self._clock = clock
        self._changing = asyncio.Lock()  # jobs are created and deleted one at a time
        self._wanted: tuple[str, Settings] | None = None
        # The jobs' time does not advance while the service is down.
        self._offset = max((each.newest for each in self.catalog.running.values()), default=0.0) - clock()

    def now(self) -> float:
        """The jobs' time: the seconds that all services on this state have run."""
        return self._clock() + self._offset

    def check_open(self) -> None:
        """Raise NotStored during the pause after a failure of the store."""
        if self._clock() < self._refuse_until:
            raise events.NotStored(self.trouble)

    def failed(self, sentence: str) -> None:
        """Handle a failed write of the log: restore all jobs with changes that were not stored."""
        if not self.trouble:
            _log.error("%s", sentence)
        self._refuse_until, self.trouble = self._clock() + PAUSE, sentence
        for runtime in list(self.catalog.running.values()):
            if runtime.logged != runtime.done:
                self.catalog.read_again(runtime)

    def change(self, *statements: stored.Statement, act: Callable[[], Any]) -> asyncio.Future[Any]:
        """Write the creation or deletion of a job; ``act`` is called when it is on disk."""
        self.check_open()
        return asyncio.shield(self.store.write(*statements, act=act))

    def enter(self, runtime: JobRuntime, event: events.Event) -> asyncio.Future[list[events.Effect]]:
        """Let the job handle an event, and log it; the future returns the effects when the event is on disk. Raises
        PacelineError if the job refuses it, and SetAside if the job failed."""
        self.check_open()
        most = max(CALLS, CALLS_PER_WORKER * runtime.job.settings.workers)
        since = runtime.logged - runtime.stored
        # Stored from time to time to bound the log, and just before a round closes: then a policy's decision in the
        # background is ready, and nothing waits for it. If no round closes, workers join and leave: then at any call.
        # A round that has closed since the last commit must be in the log, from which a restart records it.
        if since >= (most if runtime.job.closing else 2 * most) and runtime.last_closed <= runtime.done:
            self.write_state(runtime)
        try:
            effects = runtime.job.handle(event)
        except PacelineError:
            raise
        except Exception as error:  # perhaps in the middle of a change
            number = runtime.logged + 1
            _log.error("job %r failed at call %d", runtime.name, number, exc_info=error)
            self.catalog.set_aside(runtime.name, paceline.__version__, f"its call {number} failed ({error})")
            raise events.SetAside(self.catalog.aside[runtime.name]) from error
        runtime.logged, runtime.newest = runtime.logged + 1, event.now
        if any(isinstance(each, RoundResult) for each in effects):
            runtime.last_closed = runtime.logged
        runtime.write = self.store.write(
            stored.called(runtime.name, runtime.logged, events.logged(event)),
            act=functools.partial(self._act, runtime, runtime.logged, effects),
        )
        return asyncio.shield(runtime.write)  # a request may be cancelled, the call may not

    def write_state(self, runtime: JobRuntime) -> None:
        """Store a job's whole state; the calls before are no longer needed."""
        runtime.stored = runtime.logged
        settings = runtime.job.settings.model_dump()
        state = {"now": runtime.newest, "job": runtime.job.state_dict()}
        reached = stored.reached(runtime.name, settings, paceline.__version__, runtime.logged, state)
        self.store.write(*reached, act=lambda: None)

    def complain(self, runtime: JobRuntime, what: str, error: Exception) -> None:
        """Log a complaint once, not at every check."""
        if isinstance(error, events.NotStored):
            raise error
        complaint = f"{what} ({type(error).__name__}: {error})"
        if complaint != runtime.complaint:
            runtime.complaint = complaint
            _log.error("%s", complaint, exc_info=error)

    def _act(self, runtime: JobRuntime, number: int, effects: list[events.Effect]) -> list[events.Effect]:
        """Apply the effects of a call that is in the log: logs, records, and waiting requests."""
        self.trouble = ""
        if self.catalog.running.get(runtime.name) is not runtime:
            self.catalog.find(runtime.name)  # raises with the reason
            raise events.NotFound(f"job {runtime.name!r} has been deleted")
        runtime.done = number
        for effect in effects:
            self._observe(runtime, effect)
        if runtime.record is not None and not runtime.job.members.count:
            self.store.aside(runtime.record.finish)
        return effects

    def _observe(self, runtime: JobRuntime, effect: events.Effect) -> None:
        if isinstance(effect, events.Departure | events.Settle | events.Ready):
            runtime.wake()
        if isinstance(effect, events.JoinEvent):
            _log.info("job %r: worker %r joined in place %d", runtime.name, effect.name, effect.place)
        elif isinstance(effect, events.Departure):
            _log.info("job %r: worker %r %s", runtime.name, effect.name, effect.why)
        elif isinstance(effect, RoundResult):
            runtime.lately.append(effect)
            runtime.spans[bisect.bisect_left(SPANS, effect.seconds)] += 1
            runtime.spent += effect.seconds
            if runtime.record is not None:
                self.store.aside(functools.partial(runtime.record.write, effect, runtime.job.members.names()))
        elif isinstance(effect, events.Unlearned):
            what = f"the policy of job {runtime.name!r} failed at a round: its plans do not change"
            self.complain(runtime, what, effect.error)

    async def start(self, job: tuple[str, Settings] | None = None) -> None:
        """Resume the jobs, and create this one if it does not exist yet."""
        self._wanted = job
        await self.tick()  # on a full disk later ticks try again, and requests get an error

    async def stop(self) -> None:
        """Answer all waiting requests, and close the files."""
        self.release()
        await self.store.close()
        for runtime in self.catalog.running.values():
            if runtime.record is not None:
                runtime.record.close()

    def release(self) -> None:
        """Answer all waiting requests that the service stops. Safe in a signal handler of the event loop's thread."""
        self.stopping = True
        for runtime in self.catalog.running.values():
            runtime.wake()

    async def create(self, name: str, settings: Settings) -> tuple[JobRuntime, bool]:
        """The job of this name, and whether it is new. Raises Conflict if it has other settings."""
        async with self._changing:
            present = self.catalog.present(name, settings)
            if present is not None:
                return present, False
            runtime = JobRuntime(StoredJob(name, settings.model_dump()))
            made = stored.created(name, settings.model_dump(), paceline.__version__)
            await self.change(made, act=lambda: self.catalog.running.update({name: runtime}))
            await self.store.aside(lambda: self.catalog.open_record(runtime))
            return runtime, True

    async def delete(self, name: str) -> None:
        """Delete a job; its record stays."""
        async with self._changing:
            if name not in self.catalog.aside:
                self.catalog.find(name)
            await self.change(*stored.deleted(name), act=lambda: self.catalog.forget(name))

    async def join(self, job: str, name: str, secret: str | None, place: int | None) -> tuple[int, str]:
        """Let a worker join; returns its place and its secret."""
        chosen = tokens.fresh() if secret is None else secret
        digest = tokens.digest(chosen)
        async with self._found(job) as runtime:
            found = runtime.job.members.place(name, digest, place)
            await self.enter(runtime, events.JoinEvent(self.now(), name, digest, found))
        return found, chosen

    async def report(self, job: str, name: str, secret: str, report: events.Report) -> None:
        """Take a worker's report."""
        async with self._found(job) as runtime:
            runtime.job.members.known(name, secret)
            if runtime.job.check(name, report) is None:
                await runtime.on_disk()
            else:
                await self.enter(runtime, events.ReportEvent(self.now(), name, report))

    async def leave(self, job: str, name: str, secret: str) -> None:
        """Let a worker leave."""
        async with self._found(job) as runtime:
            runtime.job.members.known(name, secret)
            await self.enter(runtime, events.LeaveEvent(self.now(), name))

    async def next(
        self, job: str, name: str, secret: str, wait: float, lengths: Lengths | None = None
    ) -> Part | Waiting:
        """The worker's part of its next round, after at most ``wait`` seconds; otherwise what it waits for.

        lengths: the lengths of that round's samples, if they cost differently.
        """
        until = self._clock() + wait
        while True:
            async with self._found(job) as runtime:
                runtime.job.members.known(name, secret)
                answer, news = runtime.job.next(self.now(), name, lengths), runtime.news
                if isinstance(answer, events.Settle):
                    await self.enter(runtime, answer)
                    continue
                await runtime.on_disk()  # ``news`` may be set before this returns
            if isinstance(answer, Part) or answer.round is not None:
                return answer
            left = until - self._clock()
            if left <= 0 or self.stopping:
                return Waiting(waiting="the service is stopping") if self.stopping else answer
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(left):
                    await news.wait()

    async def tick(self) -> None:
        """Drop silent workers, and retry what could not be stored. A failure in one job affects no other job."""
        try:
            self.check_open()
            await self._resume()
            for name, runtime in list(self.catalog.running.items()):
                if self.catalog.running.get(name) is not runtime:
                    continue  # deleted meanwhile: its name may be another job's by now
                try:
                    now = self.now()
                    silent = [events.DropEvent(now, each) for each in runtime.job.silent(now)]
                    await asyncio.gather(*[self.enter(runtime, drop) for drop in silent])
                except Exception as error:
                    what = f"the deadlines of job {runtime.name!r} cannot be checked"
                    self.complain(runtime, what, error)
        except events.NotStored:
            pass  # logged already; the next tick tries again

    async def _resume(self) -> None:
        """Enter Resume into all jobs from before the start, and create the job that ``start`` was given."""
        while self.catalog.unresumed:
            runtime = self.catalog.unresumed[0]
            if self.catalog.running.get(runtime.name) is runtime:
                resumed = self.enter(runtime, events.Resume(self.now()))
                if runtime.written_by != paceline.__version__:
                    self.write_state(runtime)
                await resumed
            self.catalog.unresumed.remove(runtime)
        if self._wanted is not None:
            await self.create(*self._wanted)
            self._wanted = None

    @contextlib.asynccontextmanager
    async def _found(self, job: str) -> AsyncIterator[JobRuntime]:
        """The job of this name; a refusal within the block is raised when all changes behind it are on disk."""
        runtime = self.catalog.find(job)
        try:
            yield runtime
        except PacelineError:
            await runtime.on_disk()
            raise

    async def shown(self, view: Callable[[], T]) -> T:
        """The result of ``view`` on the jobs, returned when all of their changes are on disk."""
        result = view()
        writes = [each.write for each in self.catalog.running.values() if each.write is not None]
        if writes:
            await asyncio.wait(writes)
        # After a failure the jobs are restored from the disk, and nothing else is written during the pause.
        return view() if any(each.exception() for each in writes) else result
