"""The stored state: a log of each job's calls, on disk before they take effect, and at times its whole state.

``write`` is the only way to change it: its ``act`` is called when the statements are on disk, in the order of the
writes, or never. So the memory agrees with the disk after any failure.

One thread writes. Statements that arrive during a commit are written together in the next one, so that writers share
the cost of a commit and none waits for more than two. With SQLite's write-ahead log, a commit survives the death of
the process; with ``sync`` it is also forced to the disk, and survives a power cut.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import sqlite3
import tempfile
import weakref
import zlib
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from paceline.errors import PacelineError
from paceline.files import place_first
from paceline.serve.events import NotStored

FORMAT = 4
OURS = 0x50434C4E  # SQLite's application_id: "PCLN"
CLOSED, MORE, THAT_IS_IT = 0, 1, 2
TABLES = """
create table jobs (
    name text primary key, settings text not null, version text not null, state text, through integer not null,
    digest integer not null) without rowid;
create table calls (
    job text not null, number integer not null, call text not null, digest integer not null,
    primary key (job, number)) without rowid;
create table held (open integer not null);
insert into held values (0);
"""
GATHER = 0.002  # seconds in which calls are collected for a commit
CHECKPOINT = 1000  # statements after which all commits are copied from the -wal into the file
Statement = tuple[str, tuple[Any, ...]]
T = TypeVar("T")
_log = logging.getLogger(__name__)


class StoredJob(NamedTuple):
    """A job as it was stored: its settings, the version of Paceline that wrote it, its state after call ``through``
    (None: the initial state), and the calls since. wrong: why this cannot be used; "" if it can.
    """

    name: str
    settings: Any
    version: str = ""
    state: Any = None
    through: int = 0
    calls: Sequence[Any] = ()
    wrong: str = ""


class Entry(NamedTuple):
    """Statements for one commit, the action after it, and the future of that action's result."""

    statements: tuple[Statement, ...]
    act: Callable[[], Any]
    outcome: asyncio.Future[Any]


class Store:
    """One SQLite file. Only one process may hold it.

    on_failure: called with a sentence, in the event loop, when a commit has failed, before writers get the error.
    """

    def __init__(
        self, path: Path, sync: bool = False, on_failure: Callable[[str], None] = lambda sentence: None
    ) -> None:
        self.path, self.on_failure = path, on_failure
        self._db = opened(path, sync)
        # Called at any end of this process but a kill: the file must not look as if the -wal had been lost.
        self._closing = weakref.finalize(self, close, self._db)
        self._waiting: list[Entry] = []  # entries of the next commit
        self._since = 0  # number of statements in the -wal
        self._drain: asyncio.Task[None] | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="paceline-store")

    def read(self, name: str | None = None) -> list[StoredJob]:
        """All jobs, including damaged ones, or the one of this name; call it while nothing is being written."""
        try:
            rows = self._db.execute("select * from jobs order by name").fetchall()
            return [self._kept(*row) for row in rows if name in (None, row[0])]
        except sqlite3.Error as error:
            if name is None:
                self._closing()
            raise PacelineError(sentence(self.path, error)) from error

    def write(self, *statements: Statement, act: Callable[[], T]) -> asyncio.Future[T]:
        """Commit these statements, then call ``act`` in the event loop. The future holds the result or error of
        ``act``, or NotStored if nothing was committed; then ``act`` is not called.
        """
        outcome: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self._waiting.append(Entry(statements, act, outcome))
        if self._drain is None:
            self._drain = asyncio.create_task(self._write_all())
        return outcome

    def aside(self, action: Callable[[], None]) -> asyncio.Future[None]:
        """Run an action in the writing thread, after all that was passed to it before."""
        return asyncio.get_running_loop().run_in_executor(self._thread, action)

    async def close(self) -> None:
        """Write what is left, and release the file."""
        while self._drain is not None:
            await asyncio.wait([self._drain])
        await self.aside(lambda: None)
        self._thread.shutdown()
        self._closing()

    async def _write_all(self) -> None:
        """Commit until no entry is left; in any case, the future of every entry gets a result or an error."""
        batch: list[Entry] = []
        try:
            while self._waiting:
                await asyncio.sleep(GATHER)
                batch, self._waiting = self._waiting, []
                try:
                    await self.aside(lambda written=batch: self._commit(written))  # type: ignore[misc]
                except Exception as error:
                    self._failed(error, batch)
                else:
                    for entry in batch:
                        _carry_out(entry)
                batch = []
        finally:
            self._drain = None
            if batch or self._waiting:
                self._failed(RuntimeError("writing was interrupted"), batch)

    def _failed(self, error: Exception, batch: list[Entry]) -> None:
        """Fail a batch, of which nothing is on disk, and all later entries, since they may depend on it."""
        batch, self._waiting = batch + self._waiting, []
        refusal = NotStored(sentence(self.path, error))
        if not isinstance(error, sqlite3.Error):
            _log.error("a commit failed", exc_info=error)
        try:
            self.on_failure(str(refusal))
        finally:
            for entry in batch:
                _fail(entry.outcome, refusal)

    def _commit(self, batch: list[Entry]) -> None:
        execute = self._db.execute
        execute("begin immediate")
        try:
            for entry in batch:
                for statement, values in entry.statements:
                    execute(statement, values)
            execute("commit")
        except BaseException:
            if self._db.in_transaction:
                execute("rollback")
            raise
        self._since += sum(len(entry.statements) for entry in batch)
        if self._since >= CHECKPOINT:
            with contextlib.suppress(sqlite3.Error):  # the commit itself succeeded
                checkpoint(self._db)
                self._since = 0

    def _kept(
        self, name: str, settings: str, version: str, state: str | None, through: int, digest: int
    ) -> StoredJob:
        """One job as it was stored; ``wrong`` says if it cannot be used."""
        rows = self._db.execute(
            "select number, call, digest from calls where job = ? and number > ? order by number",
            (name, through),
        ).fetchall()
        kept = StoredJob(name, None, str(version))
        if digest != _digest(name, settings, version, state, through):
            return kept._replace(wrong="its settings or its state are damaged")
        for expected, (number, call, its_digest) in enumerate(rows, through + 1):
            if number != expected:
                return kept._replace(wrong=f"call {expected} is missing in its log")
            if its_digest != _digest(name, number, call):
                return kept._replace(wrong=f"call {number} of its log is damaged")
        try:
            calls = [json.loads(call) for _, call, _ in rows]
            return StoredJob(name, json.loads(settings), version, state and json.loads(state), through, calls)
        except (ValueError, TypeError) as error:
            return kept._replace(wrong=f"its settings, its state or its log cannot be read ({error})")


def created(name: str, settings: dict[str, Any], version: str) -> Statement:
    """The statement for a new job."""
    row = (name, json.dumps(settings), version, None, 0)
    return "insert into jobs values (?, ?, ?, ?, ?, ?)", (*row, _digest(*row))


def deleted(name: str) -> tuple[Statement, Statement]:
    """The statements that delete a job."""
    return ("delete from jobs where name = ?", (name,)), ("delete from calls where job = ?", (name,))


def called(name: str, number: int, call: list[Any]) -> Statement:
    """The statement that logs a call of a job; it does nothing if the job was just deleted."""
    row = (name, number, json.dumps(call))
    return (
        "insert into calls select ?, ?, ?, ? where exists (select 1 from jobs where name = ?)",
        (*row, _digest(*row), name),
    )


def reached(
    name: str, settings: dict[str, Any], version: str, through: int, state: dict[str, Any]
) -> tuple[Statement, Statement]:
    """The statements that store a job's state after call ``through`` and delete the calls up to it."""
    row = (name, json.dumps(settings), version, json.dumps(state), through)
    update = "update jobs set settings = ?, version = ?, state = ?, through = ?, digest = ? where name = ?"
    delete = "delete from calls where job = ? and number <= ?"
    return (update, (*row[1:], _digest(*row), name)), (delete, (name, through))


def _carry_out(entry: Entry) -> None:
    try:
        result = entry.act()
    except Exception as error:
        _fail(entry.outcome, error)
    else:
        if not entry.outcome.done():
            entry.outcome.set_result(result)


def _fail(outcome: asyncio.Future[Any], error: Exception) -> None:
    if not outcome.done():
        outcome.set_exception(error)
        outcome.exception()  # marks it as retrieved, in case no request waits for it


def _digest(*row: Any) -> int:
    """A checksum that detects flipped bytes, which SQLite does not notice."""
    return zlib.crc32("\n".join(map(str, row)).encode("utf-8", "replace"))


def opened(path: Path, sync: bool) -> sqlite3.Connection:
    """Open the file for this process alone, or create it. Raises PacelineError, with one sentence, if the state in it
    cannot be used.
    """
    log = path.with_name(f"{path.name}-wal")
    try:
        if not path.exists():
            if log.exists():
                raise PacelineError(
                    f"{path} is missing, but {log.name} is not: restore it, or choose another directory"
                )
            _make(path)
        if path.stat().st_size == 0:
            raise PacelineError(
                f"{path} is empty, so it holds no state: restore it from a backup, or delete it to start without jobs"
            )
        logged = log.exists() and log.stat().st_size > 0
        database = sqlite3.connect(path, isolation_level=None, check_same_thread=False, timeout=0.5)
    except (OSError, sqlite3.Error) as error:
        raise PacelineError(sentence(path, error)) from error
    try:
        _check(database, path, logged)
        database.execute(f"pragma synchronous={'full' if sync else 'normal'}")
        database.execute("pragma wal_autocheckpoint=0")
        try:
            checkpoint(database)
        except sqlite3.OperationalError as error:
            if not logged or "full" not in str(error):
                raise  # otherwise the file already records that the -wal holds more, and can be read
    except BaseException as error:
        database.close()
        if isinstance(error, sqlite3.Error):
            raise PacelineError(sentence(path, error)) from error
        raise
    return database


def checkpoint(database: sqlite3.Connection) -> None:
    """Copy all commits into the file itself. Raises sqlite3.Error if the disk is full; nothing is lost then."""
    database.execute(f"update held set open = {MORE}")
    database.execute("pragma wal_checkpoint(full)")
    database.execute(f"update held set open = {THAT_IS_IT}")


def close(database: sqlite3.Connection) -> None:
    """Copy all commits into the file itself, unless the disk is full, and close it."""
    with contextlib.suppress(sqlite3.Error):
        database.execute(f"update held set open = {CLOSED}")
        database.execute("pragma wal_checkpoint(truncate)")
    database.close()


def sentence(path: Path, error: Exception) -> str:
    """A sentence on what is wrong with the file, and what to do."""
    reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
    if "full" in reason or "No space" in reason:
        return f"the disk is full, nothing was changed: free some disk space for {path}"
    if "locked" in reason:
        return f"{path} is in use by another service: choose another directory, or stop that service"
    return f"{path} cannot be used ({reason}): choose another directory, or restore it from a backup"


def _make(path: Path) -> None:
    """Create the file with its tables, either completely or not at all."""
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f"{path.name}.", suffix=".new")
    os.close(handle)
    try:
        with contextlib.closing(sqlite3.connect(name, isolation_level=None)) as database:
            database.execute(f"pragma application_id={OURS}")
            database.execute(f"pragma user_version={FORMAT}")
            database.executescript(TABLES)
            database.execute("pragma journal_mode=wal")
        place_first(Path(name), path)
    finally:
        Path(name).unlink(missing_ok=True)


def _check(database: sqlite3.Connection, path: Path, logged: bool) -> None:
    def one(asked: str) -> object:
        return database.execute(asked).fetchone()[0]

    one("pragma locking_mode=exclusive")
    kind, found = one("pragma application_id"), one("pragma user_version")
    if kind != OURS:
        raise PacelineError(f"{path} is a database of another program: choose another directory")
    if found != FORMAT:
        raise PacelineError(
            f"{path} has format {found}, expected {FORMAT}: it was written by another version; choose another "
            "directory, or start that version"
        )
    if one("select open from held") == MORE and not logged:
        raise PacelineError(
            f"{path} was not closed properly, and {path.name}-wal, with the newest rounds, is missing: restore it, "
            "restore both from a backup, or choose another directory"
        )
    for table in ("jobs", "calls"):
        database.execute(f"select * from {table} limit 1").fetchone()
    wrong = one("pragma integrity_check(1)")
    if wrong != "ok":
        first = str(wrong).strip().splitlines()[-1]
        raise PacelineError(
            f"{path} is damaged ({first}): restore it from a backup, or choose another directory"
        )
