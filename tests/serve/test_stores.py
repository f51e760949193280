"""What a service finds when it starts: a store that is damaged, foreign, cut short, or of another version."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import shutil
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import paceline

pytest.importorskip("fastapi")

from paceline import PacelineError
from paceline.serve import store
from paceline.serve.service import STATE, Service
from support.calling import GOOD, playing, refused, serving
from support.guarantees import guarantee

UNCHANGED = guarantee(
    "A store that is empty, damaged, foreign or without its `-wal` ends the service with exit status 2, "
    "unchanged."
)


def copied(service: Path, place: Path) -> None:
    """As a kill would leave the store."""
    place.mkdir()
    for file in service.glob(f"{STATE}*"):
        shutil.copy(file, place)


@pytest.fixture(scope="module")
def once(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a service with two jobs leaves that is killed: the store and its -wal."""
    tmp_path = tmp_path_factory.mktemp("once")

    async def all_of_it() -> None:
        async with playing(tmp_path / "before") as call:
            await call.create("k")
            for job in "jk":
                await call.rounds(*range(5), job=job)
            copied(tmp_path / "before", tmp_path / "left")

    asyncio.run(all_of_it())
    return tmp_path / "left"


@pytest.fixture
def left(once: Path, tmp_path: Path) -> Path:
    """The same, for one test."""
    return Path(shutil.copytree(once, tmp_path / "left"))


def opened(directory: Path) -> Service:
    """A service that is gone with the test's end."""
    service = Service(directory, record=False)
    asyncio.run(service.store.close())
    return service


def change(directory: Path, *statements: str) -> None:
    """Somebody else's hand in the store."""
    with contextlib.closing(sqlite3.connect(directory / STATE)) as database:
        for statement in statements:
            database.execute(statement)
        database.commit()


def test_a_killed_and_a_closed_store_are_whole(left: Path) -> None:
    assert (left / f"{STATE}-wal").stat().st_size > 0
    for _ in range(2):
        running = opened(left).catalog.running
        assert {name: served.job.closed for name, served in running.items()} == {"j": 5, "k": 5}
        assert not (left / f"{STATE}-wal").exists(), "closed in order"
    assert [file.name for file in left.iterdir()] == [STATE], "nothing is left of how it was made"


def test_a_store_that_another_program_has_looked_into_is_whole(left: Path) -> None:
    """SQLite's own tools take the -wal into the file when they close it."""
    change(left, "select * from jobs")
    assert not (left / f"{STATE}-wal").exists()
    assert opened(left).catalog.running["j"].job.closed == 5


@UNCHANGED
def test_a_lost_wal_is_noticed_after_checkpoints_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "CHECKPOINT", 10)

    async def all_of_it() -> None:
        async with playing(tmp_path / "before") as call:
            for number in range(12):
                await call.rounds(number)
                copied(tmp_path / "before", tmp_path / f"copy-{number}")

    asyncio.run(all_of_it())
    sizes = {(tmp_path / f"copy-{number}" / f"{STATE}-wal").stat().st_size for number in range(12)}
    assert max(sizes) < 200_000, "the -wal is used again"
    for number in range(12):
        copy = tmp_path / f"copy-{number}"
        without_wal(shutil.copytree(copy, tmp_path / f"without-{number}"))
        with pytest.raises(PacelineError, match="was not closed properly"):
            opened(tmp_path / f"without-{number}")
        assert opened(copy).catalog.running["j"].job.closed == number + 1


def content(directory: Path) -> dict[str, bytes]:
    """Of all files that are not empty."""
    files = [file for file in directory.iterdir() if file.is_file()]
    return {file.name: file.read_bytes() for file in files if file.stat().st_size}


def cut_short(directory: Path) -> None:
    (directory / STATE).write_bytes(b"")


def without_wal(directory: Path) -> None:
    (directory / f"{STATE}-wal").unlink()


def empty_wal(directory: Path) -> None:
    (directory / f"{STATE}-wal").write_bytes(b"")


def wal_alone(directory: Path) -> None:
    (directory / STATE).unlink()


def no_database(directory: Path) -> None:
    without_wal(directory)
    (directory / STATE).write_bytes(b"no database at all" * 1000)


def another_programs(directory: Path) -> None:
    wal_alone(directory)
    without_wal(directory)
    with contextlib.closing(sqlite3.connect(directory / STATE)) as database:
        database.execute("create table cookies (name text)")


def of_an_older_version(directory: Path) -> None:
    change(directory, "pragma user_version=3")


def of_a_newer_version(directory: Path) -> None:
    change(directory, "pragma user_version=5")


def without_a_table(directory: Path) -> None:
    change(directory, "drop table calls")


def broken_pages(directory: Path) -> None:
    opened(directory)
    content = bytearray((directory / STATE).read_bytes())
    for page in range(1, len(content) // 4096):
        content[4096 * page : 4096 * page + 64] = b"\xff" * 64
    (directory / STATE).write_bytes(content)


def a_directory(directory: Path) -> None:
    wal_alone(directory)
    without_wal(directory)
    (directory / STATE).mkdir()


@UNCHANGED
@pytest.mark.parametrize(
    ("harm", "words"),
    [
        (cut_short, "is empty, so it holds no state: restore it from a backup, or delete it"),
        (without_wal, f"was not closed properly, and {STATE}-wal, with the newest rounds, is missing"),
        (empty_wal, "was not closed properly"),
        (wal_alone, f"is missing, but {STATE}-wal is not"),
        (no_database, f"{STATE} cannot be used .*file is not a database.*choose another directory"),
        (another_programs, "is a database of another program: choose another directory"),
        (of_an_older_version, "has format 3, expected 4: it was written by another version"),
        (of_a_newer_version, "has format 5, expected 4"),
        (without_a_table, "no such table: calls"),
        (broken_pages, "is damaged|malformed"),
        (a_directory, "cannot be used"),
    ],
)
def test_what_cannot_be_gone_on_from_is_refused(left: Path, harm: Callable[[Path], None], words: str) -> None:
    harm(left)
    before = content(left)
    for _ in range(2):
        with pytest.raises(PacelineError, match=words) as refusal:
            opened(left)
        assert "\n" not in str(refusal.value)
    assert content(left) == before, "nothing is changed"


def digested(table: str, where: str, **values: str) -> Callable[[Path], None]:
    """Puts values into rows of a table, with digests that fit: what a program wrote, not what a disk lost."""

    def harm(directory: Path) -> None:
        with contextlib.closing(sqlite3.connect(directory / STATE)) as database:
            rows = database.execute(f"select * from {table} where {where}").fetchall()
            names = [each[1] for each in database.execute(f"pragma table_info({table})")]
        keys = {"jobs": ["name"], "calls": ["job", "number"]}[table]
        statements = []
        for row in rows:
            new = dict(zip(names, row, strict=True)) | values
            new["digest"] = store._digest(*list(new.values())[:-1])
            sets = ", ".join(f"{name} = {_quoted(value)}" for name, value in new.items())
            which = " and ".join(f"{key} = {_quoted(new[key])}" for key in keys)
            statements.append(f"update {table} set {sets} where {which}")
        assert statements
        change(directory, *statements)

    return harm


def _quoted(value: Any) -> str:
    if value is None:
        return "null"
    return str(value) if isinstance(value, int) else "'" + value.replace("'", "''") + "'"


def flipped(directory: Path) -> None:
    change(
        directory,
        "update calls set call = replace(call, '1.0', '1.1') where job = 'j' and call like '%report%'",
    )


def a_row_lost(directory: Path) -> None:
    change(directory, "delete from calls where job = 'j' and number = 6")


def through_changed(directory: Path) -> None:
    change(directory, "update jobs set through = 3 where name = 'j'")


def settings(**changes: Any) -> str:
    from paceline.serve.models import Settings

    values = Settings.of(batch=12, workers=2, policy="equal", grace=1.0, first=5.0).model_dump() | changes
    return json.dumps({name: value for name, value in values.items() if value != "gone"})


def set_to(settings: str) -> Callable[[Path], None]:
    return digested("jobs", "name='j'", settings=settings)


def call_of(number: int, content: str) -> Callable[[Path], None]:
    """Another call in the log of j."""
    return digested("calls", f"job='j' and number={number}", call=content)


@guarantee(
    "A damaged job, a failing policy or an error within one job affects that job only; the others run."
)
@pytest.mark.parametrize(
    ("harm", "words"),
    [
        (flipped, "of its log is damaged"),
        (a_row_lost, "call 6 is missing in its log"),
        (through_changed, "its settings or its state are damaged"),
        (set_to("[]"), "its settings are a list: expected"),
        (set_to("{"), "cannot be read"),
        (set_to(settings(batch="gone")), "(missing: batch)"),
        (set_to(settings(colour="red")), "(unknown: colour)"),
        (set_to(settings(batch="many")), "its settings cannot be used"),
        (set_to(settings(limits=5)), "its settings cannot be used"),
        (set_to(settings(batch=-5)), "batch=-5: expected 1 or more"),
        (set_to(settings(policy="magic")), "policy 'magic' is unknown"),
        (digested("jobs", "name='j'", state="[]"), "its state cannot be used"),
        (digested("jobs", "name='j'", state='{"now": 1.0, "job": {}}'), "its state cannot be used"),
        (call_of(4, '["dance", 1.0]'), "call 4 of its log cannot be replayed"),
        (call_of(4, "{}"), "call 4 of its log cannot be replayed"),
        (call_of(4, '["reported", 1.0, "a", [0, 6]]'), "call 4 of its log cannot"),
        (call_of(3, '["settle", 100.0, 0, [6, 5]]'), "the plan of round 0 is not for 12 samples"),
        (
            call_of(4, '["reported", 1.0, "a", [3, 6, 1.0, 0.0, null, null]]'),
            "call 4 of its log cannot be replayed (worker 'a' reports round 3, a future round: expected round 0)",
        ),
    ],
)
@pytest.mark.anyio
async def test_job_that_cannot_continue_is_set_aside(
    left: Path, harm: Callable[[Path], None], words: str, caplog: pytest.LogCaptureFixture
) -> None:
    def stored() -> list[Any]:
        with contextlib.closing(sqlite3.connect(left / STATE)) as database:
            rows = database.execute("select * from jobs where name='j'").fetchall()
            return rows + database.execute("select * from calls where job='j'").fetchall()

    harm(left)
    kept = stored()
    async with serving(left) as call:
        ((job, said),) = (await call.ask("GET", "/jobs"))[1]["set_aside"].items()
        assert job == "j"
        assert said.startswith("job 'j' is set aside: ")
        assert words in said
        assert "it was written by version " in said
        assert [each.getMessage() for each in caplog.records] == [said]
        refused(await call.ask("GET", "/jobs/j"), 409, words)
        refused(await call.join("c"), 409, words)
        assert (await call.state("k"))["rounds"] == 5
    assert stored() == kept, "its stored state is kept"


@guarantee(
    "Rounds that were handed out keep their plan under a service of another version, and the log names both."
)
@pytest.mark.anyio
async def test_another_version_does_not_change_what_was_handed_out(
    left: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A round is open, planned 6 and 6; the rules that start next would have planned 4 and 8."""
    from paceline.balance.equal import Equal
    from paceline.rounds import Plan

    async with serving(left) as call:
        await call.create("l")
        await call.rounds(*range(3), job="l")
        assert (await call.next("a", job="l"))[1]["samples"] == 6
    secrets, before_init, before_step = call.secrets, Equal.init, Equal.step

    def init(self: Any) -> Any:
        plan, state = before_init(self)
        return Plan(plan.shares * [2 / 3, 4 / 3]), state

    def step(self: Any, state: Any, round: Any) -> Any:
        plan, after = before_step(self, state, round)
        return Plan(plan.shares * [2 / 3, 4 / 3]), after

    caplog.clear()
    monkeypatch.setattr(Equal, "init", init)
    monkeypatch.setattr(Equal, "step", step)
    monkeypatch.setattr(paceline, "__version__", "0+other")
    with caplog.at_level(logging.WARNING):
        for first in (True, False):
            async with serving(left) as call:
                call.secrets = secrets
                for name, offset in (("a", 0), ("b", 6)) if first else ():
                    part = (await call.next(name, job="l"))[1]
                    assert (part["round"], part["samples"], part["offset"]) == (3, 6, offset)
                    assert (await call.report(name, GOOD | {"round": 3}, job="l"))[0] == 200
                assert (await call.next("b", job="l"))[1]["samples"] == 8, "by the new rules"
    said = [each.getMessage() for each in caplog.records]
    assert len(said) == 3, "once for each job, at the first start"
    words = "rounds that were handed out keep their plans, and the next plans follow the rules"
    assert all(words in each for each in said)
