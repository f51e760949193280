"""What may be asked of a service: to make and end jobs, to join, report, go on and leave, and to drop the silent.

Only calls that can be carried out are logged: one whose outcome depends on another that is still on its way to the
disk waits for that (``turns``). So every call is on disk before it acts and is answered, and a restart goes on there.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path

from paceline import tokens
from paceline.client import Part
from paceline.serve import store as stored
from paceline.serve.catalog import Catalog
from paceline.serve.door import Door
from paceline.serve.effects import Joined, Report
from paceline.serve.events import Drop, Join, Leave, Reported, Resume, Settle
from paceline.serve.jobs import Lengths, LengthsWanted, NextRound
from paceline.serve.refusals import Conflict, NotStored
from paceline.serve.served import Served
from paceline.serve.settings import Settings
from paceline.serve.store import Kept, Store
from paceline.serve.turns import Turn

STATE, RUNS = "service.sqlite", "runs"
TICK = 0.2  # seconds between two looks at the deadlines


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
        self.store = Store(directory / STATE, sync, lambda sentence: self.door.failed(sentence))
        self.catalog = Catalog(self.store, self.runs if record else None)
        self.door = Door(self.store, self.catalog, clock)
        self.stopping = False
        self._clock = clock
        self._changing = asyncio.Lock()  # jobs are made and ended one at a time
        self._wanted: tuple[str, Settings] | None = None
        # The jobs' time stands still while the service is away.
        self._offset = max((served.newest for served in self.catalog.running.values()), default=0.0) - clock()

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
        for served in self.catalog.running.values():
            if served.record is not None:
                served.record.close()

    def release(self) -> None:
        """Answer all who wait that the service stops. Safe in a signal handler of the event loop's thread."""
        self.stopping = True
        for served in self.catalog.running.values():
            served.wake()

    async def create(self, name: str, settings: Settings) -> tuple[Served, bool]:
        """The job of this name, and whether it is new. Raises Conflict where it has other settings."""
        async with self._changing:
            present = self.catalog.present(name, settings)
            if present is not None:
                return present, False
            self.door.check_open()
            self.catalog.check_room()
            served = Served(Kept(name, settings.to_dict()))
            made = stored.created(name, settings.to_dict(), served.rules)
            await self.door.change(made, act=lambda: self.catalog.running.update({name: served}))
            await self.store.aside(lambda: self.catalog.open_record(served))
            return served, True

    async def delete(self, name: str) -> None:
        """End a job; its record stays."""
        async with self._changing:
            if name not in self.catalog.aside:
                self.catalog.find(name)
            await self.door.change(*stored.deleted(name), act=lambda: self.catalog.forget(name))

    async def join(self, job: str, name: str, secret: str | None, place: int | None) -> tuple[Joined, str]:
        """A worker joins; returns its place and its secret."""
        chosen = tokens.fresh() if secret is None else secret
        digest = tokens.digest(chosen)
        while True:
            served, found = self.catalog.find(job), None
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
        effects = await self.door.enter(served, turn, Join(self.now(), name, digest, found))
        return next(each for each in effects if isinstance(each, Joined)), chosen

    async def report(self, job: str, name: str, secret: str, report: Report) -> None:
        """A worker reports."""
        turn = Turn(name)
        served = await self._its_turn(job, name, secret, turn)
        if served.job.check(name, report) is not None:
            await self.door.enter(served, turn, Reported(self.now(), name, report))

    async def leave(self, job: str, name: str, secret: str) -> None:
        """A worker leaves."""
        turn = Turn(name, moves=True)
        served = await self._its_turn(job, name, secret, turn)
        served.job.members.here(name)
        await self.door.enter(served, turn, Leave(self.now(), name))

    async def next(
        self, job: str, name: str, secret: str, wait: float, lengths: Lengths | None = None
    ) -> Part | LengthsWanted | str:
        """The worker's part of its next round, after at most ``wait`` seconds; else what it waits for.

        lengths: of that round's samples, where they cost differently.
        """
        until = self._clock() + wait
        while True:
            served = self._known(job, name, secret)
            answer = served.job.next(name, lengths)
            if isinstance(answer, Part | LengthsWanted):
                return answer
            if isinstance(answer, NextRound):
                await self._settle(served, answer)
                continue
            left = until - self._clock()
            if left <= 0 or self.stopping:
                return "the service is stopping" if self.stopping else answer
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
        if self.door.shut:
            return
        try:
            await self._resume()
            for served in list(self.catalog.running.values()):
                try:
                    await self._drop_silent(served)
                except Exception as error:
                    self.door.complain(
                        served, f"the deadlines of job {served.name!r} cannot be looked at", error
                    )
        except NotStored:
            pass  # said already; the next look comes

    async def _drop_silent(self, served: Served) -> None:
        dropped = []
        for name in served.job.silent(self.now()):
            turn = Turn(name, moves=True)
            if served.turns.free(
                turn
            ):  # else it has just spoken, or a plan comes first: the next look will tell
                dropped.append(self.door.enter(served, turn, Drop(self.now(), name)))
        await asyncio.gather(*dropped)

    async def _resume(self) -> None:
        """Say that the service is back, and make the job that is wanted."""
        while self.catalog.unresumed:
            served = self.catalog.unresumed[0]
            if self.catalog.running.get(served.name) is served:
                await self.door.enter(served, Turn(), Resume(self.now()))
                if served.written_by != served.rules:
                    self.door.write_state(served)
            self.catalog.unresumed.remove(served)
        if self._wanted is not None:
            await self.create(*self._wanted)
            self._wanted = None

    async def _settle(self, served: Served, round: NextRound) -> None:
        """Hand out the next round, unless somebody else is about to, or somebody comes or goes."""
        turn = Turn(plans=True)
        if served.turns.free(turn):
            await self.door.enter(served, turn, Settle(self.now(), *round))
        else:
            await served.turns.change()

    async def _its_turn(self, job: str, name: str, secret: str, turn: Turn) -> Served:
        """The worker's job, once nothing that concerns the worker is on its way to the disk."""
        while True:
            served = self._known(job, name, secret)
            if served.turns.free(turn):
                return served
            await served.turns.change()

    def _known(self, job: str, name: str, secret: str) -> Served:
        served = self.catalog.find(job)
        served.job.members.known(name, secret)
        return served
