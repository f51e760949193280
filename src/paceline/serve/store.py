"""What happened, on disk before it acts: a log of each job's calls, and now and then its whole state.

``write`` is the one way in: the change that goes with it is made once it is on disk, in the order in which it was
asked for, or never. So memory is what is stored, whatever fails.

One thread writes. What comes in while it does is written together with the next commit, so that the cost of a
commit is shared and nobody waits for more than two. SQLite's write-ahead log lets a commit survive the death of
the process; with ``sync`` it is forced to the disk as well, and survives a power cut.
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
from paceline.serve.events import NotStored

FORMAT = 4
OURS = 0x50434C4E  # SQLite's application_id: "PCLN"
CLOSED, MORE, THAT_IS_IT = 0, 1, 2
TABLES = """
create table jobs (
    name text primary key, settings text not null, rules text not null, state text, through integer not null,
    digest integer not null) without rowid;
create table calls (
    job text not null, number integer not null, call text not null, digest integer not null,
    primary key (job, number)) without rowid;
create table held (open integer not null);
insert into held values (0);
"""
GATHER = 0.002  # seconds in which calls gather for a commit
CHECKPOINT = 1000  # statements after which all commits are brought from the -wal into the file
Statement = tuple[str, tuple[Any, ...]]
T = TypeVar("T")
_log = logging.getLogger(__name__)


class Kept(NamedTuple):
    """A job as it was stored: its settings, the rules that wrote it, its state after call ``through`` (None: at the
    start), and the calls since. wrong: why none of that can be used; "" where it can.
    """

    name: str
    settings: Any
    rules: str = ""
    state: Any = None
    through: int = 0
    calls: Sequence[Any] = ()
    wrong: str = ""


class Entry(NamedTuple):
    """Statements for one commit, what follows from it, and who waits for that."""

    statements: tuple[Statement, ...]
    act: Callable[[], Any]
    outcome: asyncio.Future[Any]


class Store:
    """One SQLite file. Only one process may hold it.

    on_failure: called with a sentence, in the event loop, when a commit has failed, before anybody hears of it.
    """

    def __init__(
        self, path: Path, sync: bool = False, on_failure: Callable[[str], None] = lambda sentence: None
    ) -> None:
        self.path, self.on_failure = path, on_failure
        self._db = opened(path, sync)
        # However this process ends, short of being killed: it must not look as if the -wal had been lost.
        self._closing = weakref.finalize(self, close, self._db)
        self._waiting: list[Entry] = []  # for the next commit
        self._since = 0  # statements in the -wal
        self._drain: asyncio.Task[None] | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="paceline-store")

    def read(self, name: str | None = None) -> list[Kept]:
        """All jobs, the damaged ones among them; or the one of this name, while nothing is being written."""
        try:
            rows = self._db.execute("select * from jobs order by name").fetchall()
            return [self._kept(*row) for row in rows if name in (None, row[0])]
        except sqlite3.Error as error:
            if name is None:
                self._closing()
            raise PacelineError(sentence(self.path, error)) from error

    def write(self, *statements: Statement, act: Callable[[], T]) -> asyncio.Future[T]:
        """Commit these, then ``act``, in the event loop. The future gives what that returned or raised;
        NotStored where nothing was committed and nothing done.
        """
        outcome: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self._waiting.append(Entry(statements, act, outcome))
        if self._drain is None:
            self._drain = asyncio.create_task(self._write_all())
        return outcome

    def aside(self, action: Callable[[], None]) -> asyncio.Future[None]:
        """Do this in the writing thread, after what was handed to it before."""
        return asyncio.get_running_loop().run_in_executor(self._thread, action)

    async def close(self) -> None:
        """Write what is left, and give the file free."""
        while self._drain is not None:
            await asyncio.wait([self._drain])
        await self.aside(lambda: None)
        self._thread.shutdown()
        self._closing()

    async def _write_all(self) -> None:
        """Commit by commit until nothing is left; whatever happens, everybody who waits hears of it."""
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
                self._failed(RuntimeError("the writing was broken off"), batch)

    def _failed(self, error: Exception, batch: list[Entry]) -> None:
        """Nothing of it is on disk; nor is what came after it written, which may rest on it."""
        batch, self._waiting = batch + self._waiting, []
        refusal = NotStored(sentence(self.path, error))
        if not isinstance(error, sqlite3.Error):
            _log.error("a commit failed", exc_info=error)
        try:
            self.on_failure(str(refusal))
        finally:
            for entry in batch:
                _tell(entry.outcome, refusal)

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
            with contextlib.suppress(sqlite3.Error):  # it is committed all the same
                checkpoint(self._db)
                self._since = 0

    def _kept(
        self, name: str, settings: str, rules: str, state: str | None, through: int, digest: int
    ) -> Kept:
        """One job, or what is wrong with it."""
        rows = self._db.execute(
            "select number, call, digest from calls where job = ? and number > ? order by number",
            (name, through),
        ).fetchall()
        kept = Kept(name, None, str(rules))
        if digest != _digest(name, settings, rules, state, through):
            return kept._replace(wrong="its settings or its state are damaged")
        for expected, (number, call, its_digest) in enumerate(rows, through + 1):
            if number != expected:
                return kept._replace(wrong=f"call {expected} is missing in its log")
            if its_digest != _digest(name, number, call):
                return kept._replace(wrong=f"call {number} of its log is damaged")
        try:
            calls = [json.loads(call) for _, call, _ in rows]
            return Kept(name, json.loads(settings), rules, state and json.loads(state), through, calls)
        except (ValueError, TypeError) as error:
            return kept._replace(wrong=f"its settings, its state or its log cannot be read ({error})")


def created(name: str, settings: dict[str, Any], rules: str) -> Statement:
    """A new job."""
    row = (name, json.dumps(settings), rules, None, 0)
    return "insert into jobs values (?, ?, ?, ?, ?, ?)", (*row, _digest(*row))


def deleted(name: str) -> tuple[Statement, Statement]:
    """A job is forgotten."""
    return ("delete from jobs where name = ?", (name,)), ("delete from calls where job = ?", (name,))


def called(name: str, number: int, call: list[Any]) -> Statement:
    """A job is called; nothing if it has just been deleted."""
    row = (name, number, json.dumps(call))
    return (
        "insert into calls select ?, ?, ?, ? where exists (select 1 from jobs where name = ?)",
        (*row, _digest(*row), name),
    )


def reached(
    name: str, settings: dict[str, Any], rules: str, through: int, state: dict[str, Any]
) -> tuple[Statement, Statement]:
    """A job's whole state after call ``through``; those up to there are no longer needed."""
    row = (name, json.dumps(settings), rules, json.dumps(state), through)
    update = "update jobs set settings = ?, rules = ?, state = ?, through = ?, digest = ? where name = ?"
    delete = "delete from calls where job = ? and number <= ?"
    return (update, (*row[1:], _digest(*row), name)), (delete, (name, through))


def _carry_out(entry: Entry) -> None:
    try:
        result = entry.act()
    except Exception as error:
        _tell(entry.outcome, error)
    else:
        if not entry.outcome.done():
            entry.outcome.set_result(result)


def _tell(outcome: asyncio.Future[Any], error: Exception) -> None:
    if not outcome.done():
        outcome.set_exception(error)
        outcome.exception()  # known, even if nobody waits


def _digest(*row: Any) -> int:
    """Tells flipped bytes, which SQLite does not notice."""
    return zlib.crc32("\n".join(map(str, row)).encode("utf-8", "replace"))


def opened(path: Path, sync: bool) -> sqlite3.Connection:
    """The file, made where there is none, for this process alone. Raises PacelineError, one sentence, for whatever
    cannot be gone on from.
    """
    log = path.with_name(f"{path.name}-wal")
    try:
        if not path.exists():
            if log.exists():
                raise PacelineError(
                    f"{path} is missing, and {log.name} beside it is not: restore it, or choose another directory"
                )
            _make(path)
        if path.stat().st_size == 0:
            raise PacelineError(
                f"{path} is empty, which no state is: restore it from a backup, or remove it to begin without jobs"
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
                raise  # else the file says already that there is more, and it can be read
    except BaseException as error:
        database.close()
        if isinstance(error, sqlite3.Error):
            raise PacelineError(sentence(path, error)) from error
        raise
    return database


def checkpoint(database: sqlite3.Connection) -> None:
    """Bring all commits into the file itself. Raises sqlite3.Error where the disk is full; nothing is lost then."""
    database.execute(f"update held set open = {MORE}")
    database.execute("pragma wal_checkpoint(full)")
    database.execute(f"update held set open = {THAT_IS_IT}")


def close(database: sqlite3.Connection) -> None:
    """All of it is in the file itself from now on, unless the disk is full."""
    with contextlib.suppress(sqlite3.Error):
        database.execute(f"update held set open = {CLOSED}")
        database.execute("pragma wal_checkpoint(truncate)")
    database.close()


def sentence(path: Path, error: Exception) -> str:
    """What is wrong with the file, and what to do."""
    said = getattr(error, "strerror", None) or str(error) or type(error).__name__
    if "full" in said or "No space" in said:
        return f"the disk is full, nothing was changed: make room for {path}"
    if "locked" in said:
        return f"{path} is in use by another service: choose another directory, or end that one"
    return f"{path} cannot be used ({said}): choose another directory, or restore it from a backup"


def _make(path: Path) -> None:
    """A new file, there with everything in it or not at all."""
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f"{path.name}.", suffix=".new")
    os.close(handle)
    try:
        with contextlib.closing(sqlite3.connect(name, isolation_level=None)) as database:
            database.execute(f"pragma application_id={OURS}")
            database.execute(f"pragma user_version={FORMAT}")
            database.executescript(TABLES)
            database.execute("pragma journal_mode=wal")
        try:
            os.link(name, path)
        except FileExistsError:
            pass  # another service was quicker
        except OSError:  # a file system without links
            os.rename(name, path)
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
            f"{path} has format {found}, expected {FORMAT}: it is another version's; choose another directory, or "
            "start that version"
        )
    if one("select open from held") == MORE and not logged:
        raise PacelineError(
            f"{path} was not closed in order, and {path.name}-wal, which holds the newest rounds, is missing: put it "
            "back, restore both from a backup, or choose another directory"
        )
    for table in ("jobs", "calls"):
        database.execute(f"select * from {table} limit 1").fetchone()
    wrong = one("pragma integrity_check(1)")
    if wrong != "ok":
        first = str(wrong).strip().splitlines()[-1]
        raise PacelineError(
            f"{path} is damaged ({first}): restore it from a backup, or choose another directory"
        )
