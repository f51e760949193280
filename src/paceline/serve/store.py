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
import sqlite3
import weakref
import zlib
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from paceline.errors import PacelineError
from paceline.serve import database
from paceline.serve.refusals import NotStored

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
        self._db = database.opened(path, sync)
        # However this process ends, short of being killed: it must not look as if the -wal had been lost.
        self._closing = weakref.finalize(self, database.close, self._db)
        self._waiting: list[Entry] = []  # for the next commit
        self._since = 0  # statements in the -wal
        self._drain: asyncio.Task[None] | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="paceline-store")

    def read(self) -> list[Kept]:
        """All jobs, the damaged ones among them."""
        try:
            rows = self._db.execute("select * from jobs order by name").fetchall()
            return [self._kept(*row) for row in rows]
        except sqlite3.Error as error:
            self._closing()
            raise PacelineError(database.sentence(self.path, error)) from error

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
        refusal = NotStored(database.sentence(self.path, error))
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
                database.checkpoint(self._db)
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
    """A job is called; nothing where it has just been deleted."""
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
    return (
        (
            "update jobs set settings = ?, rules = ?, state = ?, through = ?, digest = ? where name = ?",
            (*row[1:], _digest(*row), name),
        ),
        ("delete from calls where job = ? and number <= ?", (name, through)),
    )


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
