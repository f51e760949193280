"""What happened, on disk before anybody is told: a log of each job's calls, and now and then its whole state.

One thread writes. What comes in while it does is written together with the next commit, so that the cost of a
commit is shared and nobody waits for more than two. SQLite's write-ahead log lets a commit survive the death of
the process; with ``sync`` it is forced to the disk as well, and survives a power cut.
"""

from __future__ import annotations

import asyncio
import json
import sqlite3
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from paceline.errors import PacelineError
from paceline.serve.refusals import Stored

FORMAT = 1
GATHER = 0.002  # seconds in which calls gather for a commit
TABLES = """
create table if not exists jobs (
    name text primary key, settings text not null, state text, through integer not null) without rowid;
create table if not exists calls (
    job text not null, number integer not null, call text not null, primary key (job, number)) without rowid;
"""
Statement = tuple[str, tuple[Any, ...]]


class Kept(NamedTuple):
    """A job as it was stored: its settings, its state after call ``through`` (None: at the start), and the
    calls since.
    """

    name: str
    settings: dict[str, Any]
    state: dict[str, Any] | None
    through: int
    calls: list[list[Any]]


class Store:
    """One SQLite file. Only one process may hold it.

    on_failure: called with a sentence, in the event loop, when a commit has failed, before anybody hears of it.
    """

    def __init__(
        self, path: Path, sync: bool = False, on_failure: Callable[[str], None] = lambda sentence: None
    ) -> None:
        self.path, self.on_failure = path, on_failure
        self._buffer: list[Statement] = []
        self._actions: list[Callable[[], None]] = []  # to follow the buffer
        self._gathering: asyncio.Future[None] | None = None  # resolved when the buffer is on disk
        self._writing: asyncio.Future[None] | None = None  # resolved when what left it last is
        self._drain: asyncio.Task[None] | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="paceline-store")
        try:
            self._db = sqlite3.connect(path, isolation_level=None, check_same_thread=False, timeout=0.5)
            for setting in (
                "locking_mode=exclusive",
                "journal_mode=wal",
                f"synchronous={'full' if sync else 'normal'}",
            ):
                self._db.execute(f"pragma {setting}")
            found = self._db.execute("pragma user_version").fetchone()[0]
            if found not in (0, FORMAT):
                raise PacelineError(
                    f"{path} has format {found}, expected {FORMAT}: it is another version's; choose another directory"
                )
            self._db.executescript(TABLES)
            self._db.execute(f"pragma user_version={FORMAT}")
        except sqlite3.Error as error:
            raise PacelineError(_sentence(path, error)) from error

    def read(self) -> list[Kept]:
        """All jobs."""
        try:
            jobs = self._db.execute(
                "select name, settings, state, through from jobs order by name"
            ).fetchall()
            kept = []
            for name, settings, state, through in jobs:
                rows = self._db.execute(
                    "select call from calls where job = ? and number > ? order by number", (name, through)
                )
                calls = [json.loads(call) for (call,) in rows]
                kept.append(Kept(name, json.loads(settings), state and json.loads(state), through, calls))
        except (sqlite3.Error, ValueError) as error:
            raise PacelineError(_sentence(self.path, error)) from error
        return kept

    def create(self, name: str, settings: dict[str, Any]) -> None:
        """A new job."""
        self._add("insert into jobs values (?, ?, null, 0)", (name, json.dumps(settings)))

    def delete(self, name: str) -> None:
        """Forget a job."""
        self._add("delete from jobs where name = ?", (name,))
        self._add("delete from calls where job = ?", (name,))

    def call(self, name: str, number: int, call: list[Any]) -> None:
        """A job was called."""
        self._add("insert into calls values (?, ?, ?)", (name, number, json.dumps(call)))

    def state(self, name: str, through: int, state: dict[str, Any]) -> None:
        """A job's whole state after call ``through``; those up to there are no longer needed."""
        self._add("update jobs set state = ?, through = ? where name = ?", (json.dumps(state), through, name))
        self._add("delete from calls where job = ? and number <= ?", (name, through))

    async def durable(self) -> None:
        """Wait until all that was added so far is on disk. Raises Stored when it could not be."""
        waits = self._gathering or self._writing
        if waits is not None:
            await asyncio.shield(waits)

    def then(self, action: Callable[[], None]) -> None:
        """Do this in the writing thread, once what was added so far is on disk; not at all where that fails."""
        if self._gathering is None:
            self._thread.submit(action)
        else:
            self._actions.append(action)

    async def close(self) -> None:
        """Write what is left, and give the file free."""
        if self._drain is not None:
            await self._drain
        await asyncio.get_running_loop().run_in_executor(self._thread, lambda: None)
        self._thread.shutdown()
        self._db.close()

    def _add(self, statement: str, values: tuple[Any, ...]) -> None:
        self._buffer.append((statement, values))
        if self._gathering is None:
            self._gathering = asyncio.get_running_loop().create_future()
            if self._drain is None:
                self._drain = asyncio.create_task(self._write_all())

    async def _write_all(self) -> None:
        """Commit by commit until nothing is left."""
        loop = asyncio.get_running_loop()
        try:
            while self._gathering is not None:
                await asyncio.sleep(GATHER)
                batch, self._buffer = self._buffer, []
                actions, self._actions = self._actions, []
                written, self._gathering = self._gathering, None
                self._writing = written
                try:
                    await loop.run_in_executor(self._thread, self._commit, batch)
                except sqlite3.Error as error:
                    self._failed(Stored(_sentence(self.path, error)), written)
                else:
                    written.set_result(None)
                    for action in actions:
                        self._thread.submit(action)
                self._writing = None
        finally:
            self._drain = None

    def _failed(self, error: Stored, written: asyncio.Future[None]) -> None:
        """Nothing of it is on disk, nor what followed from it: all who wait are told."""
        gathering, self._gathering = self._gathering, None
        self._buffer, self._actions = [], []
        self.on_failure(str(error))
        for future in (written, gathering):
            if future is not None:
                future.set_exception(error)
                future.exception()  # known, even if nobody waits

    def _commit(self, batch: list[Statement]) -> None:
        execute = self._db.execute
        execute("begin immediate")
        try:
            for statement, values in batch:
                execute(statement, values)
            execute("commit")
        except BaseException:
            if self._db.in_transaction:
                execute("rollback")
            raise


def _sentence(path: Path, error: Exception) -> str:
    said = str(error)
    if "full" in said:
        return f"the disk is full, nothing was changed: make room for {path}"
    if "locked" in said:
        return f"{path} is in use by another service: choose another directory, or end that one"
    return f"{path} cannot be used ({said}): choose another directory, or restore it"
