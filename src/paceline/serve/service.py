"""The jobs of one service: every call is on disk before it acts and is answered, and a restart goes on from there.

``_enter`` is the one door: whatever changes a job is checked, logged, and carried out when it is in the log, in the
log's order. Should the log fail, nothing has happened, and all who wait are told. Only calls that can be carried out
are logged: one whose outcome depends on another that is still on its way to the disk waits for that (``turns``).

A job that cannot go on, from its log at the start or in the middle, is set aside: what is stored of it is kept, it is
named in the log and in the API, and all others run.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import time
from collections.abc import Callable
from pathlib import Path

from paceline.client import Part
from paceline.errors import PacelineError
from paceline.serve import events, tokens
from paceline.serve import store as stored
from paceline.serve.effects import Closed, Effect, Joined, Left, Report, Settled, Unlearned
from paceline.serve.events import Drop, Event, Join, Leave, Reported, Resume, Settle
from paceline.serve.recording import Record
from paceline.serve.refusals import Conflict, NotFound, NotStored, SetAside
from paceline.serve.served import Served
from paceline.serve.settings import Settings
from paceline.serve.store import Kept, Store
from paceline.serve.turns import Turn

MOST_JOBS = 100
STATE, RUNS = "service.sqlite", "runs"
TICK = 0.2  # seconds between two looks at the deadlines
PAUSE = 1.0  # seconds for which a store that failed is left alone
CALLS = 1000  # calls after which a job's whole state is stored, and
CALLS_PER_WORKER = 8
Observer = Callable[[str, Effect], None]
_log = logging.getLogger(__name__)


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
        self.jobs: dict[str, Served] = {}
        self.aside: dict[str, str] = {}  # jobs that cannot go on, and why
        self.trouble = ""  # why nothing can be stored just now
        self._recording, self._clock = record, clock
        self._refuse_until = 0.0
        self._changing = asyncio.Lock()  # jobs are made and ended one at a time
        self._unresumed: list[Served] = []
        self._wanted: tuple[str, Settings] | None = None
        self._load()
        # The jobs' time stands still while the service is away.
        self._offset = max((served.newest for served in self.jobs.values()), default=0.0) - clock()

    def now(self) -> float:
        """Seconds that services on this state have run."""
        return self._clock() + self._offset

    async def start(self, job: tuple[str, Settings] | None = None) -> None:
        """Take the jobs up again, and make this one where it is not there yet."""
        self._wanted = job
        await self.tick()  # with a full disk it is tried again, and requests are told

    async def stop(self) -> None:
        """Let go of all who wait, and of the files."""
        self.release()
        await self.store.close()
        for served in self.jobs.values():
            if served.record is not None:
                served.record.close()

    def release(self) -> None:
        """Answer all who wait that the service stops. Safe in a signal handler of the event loop's thread."""
        self.stopping = True
        for served in self.jobs.values():
            served.wake()

    def present(self, name: str, settings: Settings) -> Served | None:
        """The job of this name where there is one. Raises Conflict where it has other settings."""
        if name in self.aside:
            raise SetAside(self.aside[name])
        present = self.jobs.get(name)
        if present is not None and present.job.settings != settings:
            raise Conflict(
                f"job {name!r} exists with other settings: choose another name, or delete it first"
            )
        return present

    async def create(self, name: str, settings: Settings) -> tuple[Served, bool]:
        """The job of this name, and whether it is new. Raises Conflict where it has other settings."""
        async with self._changing:
            present = self.present(name, settings)
            if present is not None:
                return present, False
            self._writable()
            if len(self.jobs) + len(self.aside) >= MOST_JOBS:
                raise Conflict(f"there are {MOST_JOBS} jobs: delete one first")
            served = Served(Kept(name, settings.to_dict()))
            made = stored.created(name, settings.to_dict(), served.rules)
            await asyncio.shield(self.store.write(made, act=lambda: self.jobs.update({name: served})))
            if self._recording:
                await self.store.aside(lambda: self._open_record(served))
            return served, True

    async def delete(self, name: str) -> None:
        """End a job; its record stays."""
        async with self._changing:
            if name not in self.aside:
                self.served(name)
            self._writable()
            await asyncio.shield(self.store.write(*stored.deleted(name), act=lambda: self._forget(name)))

    def served(self, name: str) -> Served:
        """The job of this name; raises NotFound, or SetAside."""
        served = self.jobs.get(name)
        if served is None:
            if name in self.aside:
                raise SetAside(self.aside[name])
            known = ", ".join(list(self.jobs)[:5]) or "none"
            raise NotFound(f"job {name!r} is unknown here: create it first (there are: {known})")
        return served

    async def join(self, job: str, name: str, secret: str | None, place: int | None) -> tuple[Joined, str]:
        """A worker joins; returns its place and its secret."""
        chosen = tokens.fresh() if secret is None else secret
        digest = tokens.digest(chosen)
        while True:
            served, found = self.served(job), None
            promised = served.turns.places
            try:
                found = served.job.members.place(name, digest, place, promised)
            except Conflict:
                if not promised:
                    raise
            turn = Turn(name, found, moves=True)
            if found is not None and served.turns.free(turn):
                break
            await served.turns.change()
        effects = await self._enter(served, turn, Join(self.now(), name, digest, found))
        return next(each for each in effects if isinstance(each, Joined)), chosen

    async def report(self, job: str, name: str, secret: str, report: Report) -> None:
        """A worker reports."""
        turn = Turn(name)
        served = await self._its_turn(job, name, secret, turn)
        if served.job.check(name, report) is not None:
            await self._enter(served, turn, Reported(self.now(), name, report))

    async def leave(self, job: str, name: str, secret: str) -> None:
        """A worker leaves."""
        turn = Turn(name, moves=True)
        served = await self._its_turn(job, name, secret, turn)
        served.job.members.here(name)
        await self._enter(served, turn, Leave(self.now(), name))

    async def next(self, job: str, name: str, secret: str, wait: float) -> Part | str:
        """The worker's part of its next round, after at most ``wait`` seconds; else what it waits for."""
        until = self._clock() + wait
        while True:
            served = self._known(job, name, secret)
            part = served.job.part(name)
            if part is not None:
                return part
            if served.job.may_settle():
                await self._settle(served)
                continue
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

    async def tick(self) -> None:
        """Drop the silent, and do what could not be stored before. Whatever goes wrong in a job stays with it."""
        if self._clock() < self._refuse_until:
            return
        try:
            await self._resume()
            for served in list(self.jobs.values()):
                try:
                    await self._drop_silent(served)
                except Exception as error:
                    self._complain(served, f"the deadlines of job {served.name!r} cannot be looked at", error)
        except NotStored:
            pass  # said already; the next look comes

    async def _drop_silent(self, served: Served) -> None:
        dropped = []
        for name in served.job.silent(self.now()):
            turn = Turn(name, moves=True)
            if served.turns.free(
                turn
            ):  # else it has just spoken, or a plan comes first: the next look will tell
                dropped.append(self._enter(served, turn, Drop(self.now(), name)))
        await asyncio.gather(*dropped)

    async def _resume(self) -> None:
        """Say that the service is back, and make the job that is wanted."""
        while self._unresumed:
            served = self._unresumed[0]
            if self.jobs.get(served.name) is served:
                await self._enter(served, Turn(), Resume(self.now()))
                if served.written_by != served.rules:
                    self._write_state(served)
            self._unresumed.remove(served)
        if self._wanted is not None:
            await self.create(*self._wanted)
            self._wanted = None

    async def _settle(self, served: Served) -> None:
        """Hand out the next round, unless somebody else is about to or there is no plan for those present."""
        turn = Turn(plans=True)
        if not served.turns.free(turn):
            await served.turns.change()
            return
        self._writable()
        loads = served.job.plan()
        if loads is not None:
            await self._enter(served, turn, Settle(self.now(), served.job.settled, loads))

    async def _its_turn(self, job: str, name: str, secret: str, turn: Turn) -> Served:
        """The worker's job, once nothing that concerns the worker is on its way to the disk."""
        while True:
            served = self._known(job, name, secret)
            if served.turns.free(turn):
                return served
            await served.turns.change()

    def _known(self, job: str, name: str, secret: str) -> Served:
        served = self.served(job)
        served.job.members.known(name, secret)
        return served

    def _writable(self) -> None:
        if self._clock() < self._refuse_until:
            raise NotStored(self.trouble)

    def _enter(self, served: Served, turn: Turn, event: Event) -> asyncio.Future[list[Effect]]:
        """The door: log an event that the job will take, and then have the job handle it. Its turn must be free."""
        self._writable()
        served.logged += 1
        served.turns.take(turn)
        outcome = self.store.write(
            stored.called(served.name, served.logged, events.logged(event)),
            act=functools.partial(self._act, served, served.logged, event),
        )
        outcome.add_done_callback(lambda _: served.turns.give_back(turn))
        return asyncio.shield(outcome)  # whoever waits may go; the call is made all the same

    def _act(self, served: Served, number: int, event: Event) -> list[Effect]:
        """An event is in the log: have the job handle it."""
        self.trouble = ""
        if self.jobs.get(served.name) is not served:
            self.served(served.name)  # says why
            raise NotFound(f"job {served.name!r} has been deleted")
        try:
            self._store_state(served)
            effects = served.job.handle(event)
        except Exception as error:
            _log.error("job %r failed at call %d", served.name, number, exc_info=error)
            del self.jobs[served.name]
            self._set_aside(served.name, served.rules, f"call {number} of its log failed ({error})")
            served.wake()
            raise SetAside(self.aside[served.name]) from error
        served.done, served.newest = number, event.now
        if served.job.may_settle() or any(isinstance(each, Left | Settled) for each in effects):
            served.wake()
        for effect in effects:
            self._observe(served, effect)
        if served.record is not None and not served.job.members.count:
            self.store.aside(served.record.finish)
        return effects

    def _observe(self, served: Served, effect: Effect) -> None:
        if isinstance(effect, Joined | Left):
            _log.info("job %r: %s", served.name, effect)
        for observe in self.observers:
            observe(served.name, effect)
        if served.record is not None and isinstance(effect, Closed):
            self.store.aside(functools.partial(served.record.write, effect))
        if isinstance(effect, Unlearned):
            what = f"the policy of job {served.name!r} failed at a round: its plans are those of before"
            self._complain(served, what, effect.error)

    def _store_state(self, served: Served) -> None:
        """Store the whole state now and then, so that the log does not grow: just before a round closes, since a
        decision that is made aside is ready by then, and nothing waits for it.
        """
        most = max(CALLS, CALLS_PER_WORKER * served.job.settings.workers)
        if served.job.closing and served.done - served.stored >= most:
            self._write_state(served)

    def _write_state(self, served: Served) -> None:
        served.stored = served.done
        settings = served.job.settings.to_dict()
        reached = stored.reached(served.name, settings, served.rules, served.done, served.state())
        self.store.write(*reached, act=lambda: None)

    def _load(self) -> None:
        """All jobs as they are on disk."""
        for kept in self.store.read():
            try:
                served = Served(kept)
            except PacelineError as error:
                _log.debug("job %r cannot go on", kept.name, exc_info=error)
                self._set_aside(kept.name, kept.rules, str(error))
                continue
            self.jobs[kept.name] = served
            if served.logged or served.written_by != served.rules:
                self._unresumed.append(served)
            if self._recording:
                self._open_record(served)
            if served.written_by != served.rules:
                _log.warning(
                    "job %r was written by rules %s, and these are %s: the rounds that were handed out stand, and "
                    "the next plans are made by these",
                    kept.name,
                    kept.rules,
                    served.rules,
                )

    def _open_record(self, served: Served) -> None:
        served.record = Record(self.runs / served.name, served.name, served.job.settings)
        served.record.open(served.first, served.job.settled)
        for closed in served.behind:
            served.record.write(closed)
        served.behind = []

    def _forget(self, name: str) -> None:
        self.aside.pop(name, None)
        served = self.jobs.pop(name, None)
        if served is not None:
            served.wake()
            if served.record is not None:
                self.store.aside(served.record.finish)
                self.store.aside(served.record.close)

    def _set_aside(self, name: str, rules: str, why: str) -> None:
        self.aside[name] = (
            f"job {name!r} is set aside: {why}; it was written by rules {rules}, and what is stored of it is kept: "
            "start the service with these rules or restore its state, or delete the job"
        )
        _log.error("%s", self.aside[name])

    def _complain(self, served: Served, what: str, error: Exception) -> None:
        """Say it once in the log, not at every look."""
        if isinstance(error, NotStored):
            raise error
        complaint = f"{what} ({type(error).__name__}: {error})"
        if complaint != served.complaint:
            served.complaint = complaint
            _log.error("%s", complaint, exc_info=error)

    def _failed(self, sentence: str) -> None:
        """The log could not be written: what was on its way has not happened."""
        if not self.trouble:
            _log.error("%s", sentence)
        self._refuse_until, self.trouble = self._clock() + PAUSE, sentence
        for served in self.jobs.values():
            served.logged, served.stored = served.done, 0  # a state that was on its way is written once more
