"""The file in which a service keeps its state: opened only where nothing of it is missing, damaged or foreign.

A commit goes to the file's ``-wal`` first, and from there to the file itself now and then (``checkpoint``). So that a
lost ``-wal`` is noticed, the file itself then says that there is more to come, and the ``-wal`` says that this is it.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
import tempfile
from pathlib import Path

from paceline.errors import PacelineError

FORMAT = 2
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
    if kind != OURS and not (
        kind == 0 and found == 1 and one("select count(*) from sqlite_master where name = 'calls'")
    ):
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
