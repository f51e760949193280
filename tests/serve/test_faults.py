"""A store that fails, a policy that fails, a service that is killed at any moment: memory is what is stored."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import random
import shutil
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fastapi")

from paceline import policies
from paceline.balance.equal import Equal
from paceline.client import Part
from paceline.serve.events import Report
from paceline.serve.models import Settings
from paceline.serve.service import STATE, Service
from support.calling import GOOD, JOB, Caller, playing, refused, serving
from support.guarantees import guarantee

pytestmark = pytest.mark.anyio
RESTARTS = guarantee(
    "A restart at any moment finds what was answered with 200, also after a kill, a full disk or a failed"
    " commit."
)
ONE_JOB_ALONE = guarantee(
    "A damaged job, a failing policy or an error within one job affects that job only; the others run."
)

FULL = sqlite3.OperationalError("database or disk is full")


def states(service: Service) -> str:
    """Everything that the jobs are."""
    running = sorted(service.catalog.running.items())
    return json.dumps(
        {name: {"now": served.newest, "job": served.job.state_dict()} for name, served in running}
    )


def killed(service: Service) -> str:
    """What a service finds that starts where this one is killed now."""
    directory = service.store.path.parent / "killed"
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir()
    for file in service.store.path.parent.glob(f"{STATE}*"):
        shutil.copy(file, directory)
    after = Service(directory, record=False)
    assert not after.catalog.aside
    found = states(after)
    asyncio.get_running_loop().create_task(after.store.close())
    return found


@contextlib.contextmanager
def failing(service: Service, error: BaseException = FULL) -> Iterator[list[int]]:
    """No commit succeeds; the list counts them."""
    commit, tried = service.store._commit, [0]

    def fail(batch: list[Any]) -> None:
        tried[0] += 1
        raise error

    service.store._commit = fail  # type: ignore[method-assign]
    try:
        yield tried
    finally:
        service.store._commit = commit  # type: ignore[method-assign]


@RESTARTS
async def test_a_full_disk_a_free_one_and_a_kill(call: Caller) -> None:
    """Nothing of what was refused is in memory, nothing of what was answered is lost."""
    before = states(call.service)
    with failing(call.service) as tried:
        refused(await call.join("c"), 409, "all 2 places are taken")
        answer = await call.ask("PUT", "/jobs/k", JOB)
        refused(answer, 507, "the disk is full, nothing was changed: free some")
        assert tried == [1]
        refused(await call.next("a"), 507, "the disk is full")  # within the pause: not tried again
        assert tried == [1]
    assert (await call.ask("GET", "/jobs"))[1]["storing"].startswith("the disk is full")
    refused(await call.next("a"), 507, "the disk is full")  # free again, still within the pause
    assert states(call.service) == before == killed(call.service)
    call.clock.now += 1.5
    assert (await call.next("a"))[0] == 200
    told = (await call.ask("GET", "/jobs"))[1]
    assert (told["set_aside"], told["storing"]) == ({}, "")
    assert states(call.service) == killed(call.service)
    assert (await call.report("a", GOOD))[0] == 200
    after = states(call.service)
    assert after == killed(call.service)
    assert json.loads(after)["j"]["job"]["counts"] == [1, 0, 0, 1, 0]


@RESTARTS
@pytest.mark.parametrize("error", [FULL, OSError(28, "No space left on device"), MemoryError()])
async def test_everything_that_waits_is_answered(call: Caller, tmp_path: Path, error: BaseException) -> None:
    """Twice, with calls of every kind on their way, the second time with a fault in what hears of the failure."""
    asyncio.get_running_loop().set_exception_handler(None)  # that fault is none of the test's
    parts = [(await call.next(name))[1] for name in "ab"]
    await call.report("a", GOOD)
    before = states(call.service)
    heard = call.service.store.on_failure
    for attempt in range(2):
        waiting = asyncio.create_task(call.next("a", wait=60.0))
        await asyncio.sleep(0.01)
        if attempt:
            call.service.store.on_failure = lambda sentence: (heard(sentence), 1 / 0)  # type: ignore[func-returns-value, assignment]
        with failing(call.service, error):
            answers = await asyncio.wait_for(
                asyncio.gather(
                    call.report("b", GOOD),
                    call.report("b", GOOD),
                    call.leave("a"),
                    call.ask("PUT", "/jobs/k", JOB),
                    call.ask("DELETE", "/jobs/j"),
                ),
                8.0,
            )
        for status, said in answers:
            assert status == 507
            assert said["error"].endswith(f"{tmp_path / STATE}") or "cannot be used" in said["error"]
        assert states(call.service) == before == killed(call.service)
        assert not waiting.done(), "it waits for a plan, not for the disk"
        waiting.cancel()
        call.clock.now += 1.5
    call.service.store.on_failure = heard
    assert (await call.next("b"))[1] == parts[1]
    waiting = asyncio.create_task(call.next("a", wait=60.0))
    await asyncio.sleep(0.01)
    assert (await call.report("b", GOOD))[0] == 200
    assert (await waiting)[1]["round"] == 1
    assert states(call.service) == killed(call.service)


@RESTARTS
async def test_a_database_that_may_not_grow(tmp_path: Path) -> None:
    """SQLite's own refusal, again and again, and room between."""
    async with playing(tmp_path, grace=100.0) as call:
        database, answered = call.service.store._db, 0

        async def turn(name: str) -> int:
            """A part and its report; the first status that is not 200."""
            status, part = await call.next(name)
            if status == 200:
                status, _ = await call.report(name, GOOD | {"round": part["round"]})
                nonlocal answered
                answered += status == 200
            return status

        for _ in range(3):
            pages = database.execute("pragma page_count").fetchone()[0]
            database.execute(f"pragma max_page_count={pages}")
            for attempt in range(400):
                if await turn("ab"[attempt % 2]) == 507:
                    break
            else:
                raise AssertionError("never full")
            assert (await call.state())["reports"] == answered
            assert states(call.service) == killed(call.service)
            database.execute("pragma max_page_count=1000000")
            call.clock.now += 1.5
            assert {await turn(name) for name in "abab"} <= {200, 202}
        assert answered > 20
        assert states(call.service) == killed(call.service)


async def test_a_round_that_all_left_is_divided_again_and_takes_no_report_of_its_first_parts(
    call: Caller,
) -> None:
    await call.create("k", "a", start=1)
    before = (await call.next("a", job="k"))[1]
    assert (await call.leave("a", job="k"))[0] == 204
    for name in "ab":
        await call.join(name, job="k")
    after = (await call.next("a", job="k"))[1]
    assert (before["round"], after["round"]) == (0, 0)
    assert (before["samples"], after["samples"]) == (12, 6)
    late = GOOD | {"samples": before["samples"]}
    said = "samples=12: expected at most 6, the plan of round 0 for worker 'a'"
    refused(await call.report("a", late, job="k"), 422, said)
    assert (await call.report("a", GOOD, job="k"))[0] == 200


@RESTARTS
@pytest.mark.parametrize("seed", range(3))
async def test_restart_after_simultaneous_requests_finds_the_same_state(tmp_path: Path, seed: int) -> None:
    """Workers that come, report, go, replace themselves and are dropped all at the same time; commits that fail."""
    job = JOB | {"batch": 40, "workers": 4, "start": 1, "ahead": seed % 3, "policy": "level", "grace": 0.5}
    dice = random.Random(seed)
    secrets = {("j", name): f"secret-of-worker-{name}" for name in "abcdef"}
    counted = {"sent": 0}

    async def worker(call: Caller, name: str) -> None:
        for _ in range(25):
            what = dice.choice(["join", "next", "next", "report", "report", "report", "leave", "twice"])
            if what == "join":
                place = dice.choice([None, None, dice.randrange(4)])
                status, _ = await call.join(name, secret=secrets["j", name], place=place)
                call.secrets["j", name] = secrets["j", name]
            elif what == "leave":
                status, _ = await call.leave(name)
            else:
                status, part = await call.next(name)
                if status == 200 and what != "next":
                    call.clock.now += dice.choice([0.0, 0.1])
                    body = {"round": part["round"], "samples": part["samples"], "seconds": 0.1}
                    sent = [call.report(name, body) for _ in range(1 + (what == "twice"))]
                    statuses = [status for status, _ in await asyncio.gather(*sent)]
                    counted["sent"] += 200 in statuses
                    status = statuses[0]
            # 422: the round was taken back when all had left it, and then divided among more.
            assert status in (200, 201, 202, 204, 404, 403, 409, 410, 422, 507), status
            await asyncio.sleep(0)

    async def trouble(call: Caller) -> None:
        for _ in range(6):
            await asyncio.sleep(0.05)
            with failing(call.service):
                await asyncio.sleep(0.01)
            call.clock.now += 1.1
            await call.service.tick()

    async with serving(tmp_path) as call:
        assert (await call.ask("PUT", "/jobs/j", job))[0] == 201
        call.secrets = dict(secrets)
        workers = (worker(call, name) for name in 2 * "abcdef")
        await asyncio.wait_for(asyncio.gather(*workers, trouble(call)), 60)
        call.clock.now += 1.5
        assert not call.service.catalog.aside
        assert states(call.service) == killed(call.service)
        assert call.service.catalog.running["j"].job.reports <= counted["sent"]


class Faulty(Equal):
    """Learns nothing from a round in which somebody took 13 seconds, but fails at it."""

    def step(self, state: Any, round: Any) -> Any:
        if (round.seconds == 13.0).any():
            raise ZeroDivisionError("thirteen")
        return super().step(state, round)


class Planless(Equal):
    """Makes shares that are none after such a round."""

    def step(self, state: Any, round: Any) -> Any:
        plan, after = super().step(state, round)
        return (type(plan)(plan.shares * 0.0) if (round.seconds == 13.0).any() else plan), after


@ONE_JOB_ALONE
@pytest.mark.parametrize("kind", [Faulty, Planless])
async def test_failing_policy_affects_only_its_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, kind: Any
) -> None:
    monkeypatch.setitem(policies.POLICIES, "faulty", kind)
    with caplog.at_level(logging.WARNING):
        async with playing(tmp_path) as call:
            await call.create("f", "cd", policy="faulty")
            for number, seconds in enumerate((1.0, 13.0, 13.0, 1.0)):
                for name in "cd":
                    assert (await call.next(name, job="f"))[1]["samples"] == 6
                await call.rounds(number, names="cd", job="f", seconds=seconds)
            assert (await call.state("f"))["rounds"] == 4
            assert states(call.service) == killed(call.service)
    (said,) = [each.getMessage() for each in caplog.records]
    assert said.startswith("the policy of job 'f' failed at a round: its plans do not change (")
    assert "thirteen" in said or "shares" in said


@ONE_JOB_ALONE
async def test_error_in_one_job_keeps_the_deadlines_of_others(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with playing(tmp_path) as call:
        await call.create("a-first-one", "")
        wrong = call.service.catalog.running["a-first-one"].job
        wrong.silent = lambda now: 1 / 0  # type: ignore[assignment, method-assign, return-value]
        call.service.catalog.running = dict(sorted(call.service.catalog.running.items()))  # looked at first
        await call.next("a")
        call.clock.now += 6.0
        for _ in range(200):
            await asyncio.sleep(0.02)
            if (await call.state())["dropped"] == 2:
                break
        assert (await call.state())["dropped"] == 2
    (said,) = [each.getMessage() for each in caplog.records]
    assert said.startswith("the deadlines of job 'a-first-one' cannot be checked (ZeroDivisionError")


@ONE_JOB_ALONE
async def test_a_fault_of_the_service_sets_one_job_aside(
    call: Caller, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half a change is never built upon: the job stands still, those who wait for it hear why, the others go on."""
    await call.create("k", "")
    for name in "ab":
        await call.next(name)
    await call.report("a", GOOD)
    waiting = asyncio.create_task(call.next("a", wait=60.0))
    await asyncio.sleep(0.01)
    with monkeypatch.context() as patched:
        patched.setattr("paceline.serve.places.PendingRound.report", lambda *_: 1 / 0)
        refused(await call.report("b", GOOD), 409, "job 'j' is set aside: its call 5 failed (division")
    refused(await asyncio.wait_for(waiting, 8.0), 409, "job 'j' is set aside")
    aside = (await call.ask("GET", "/jobs"))[1]["set_aside"]
    assert list(aside) == ["j"]
    assert "start the service with this version or restore its state" in aside["j"]
    refused(await call.ask("PUT", "/jobs/j", JOB), 409, "job 'j' is set aside")
    assert (await call.join("c", job="k"))[0] == 201
    assert "paceline_jobs_set_aside 1.0" in await call.page("/metrics")
    assert (await call.ask("DELETE", "/jobs/j"))[0] == 204
    await call.create("j", "")


async def test_a_job_that_is_wanted_is_made_when_there_is_room(tmp_path: Path) -> None:
    """As ``paceline serve --batch`` asks for it at its start."""
    service = Service(tmp_path)
    with failing(service):
        await service.start(("default", Settings.of(batch=8, workers=1)))
        assert not service.catalog.running
    await asyncio.sleep(1.1)
    await service.tick()
    assert list(service.catalog.running) == ["default"]
    await service.stop()


@RESTARTS
async def test_answers_show_only_what_is_on_disk(call: Caller) -> None:
    """A report is on its way while others ask for figures, or are refused because of it; then the disk is full."""
    for name in "ab":
        await call.next(name)
    await call.report("a", GOOD)
    before = await call.state()
    with failing(call.service):
        reported, other, told, made, metrics = await asyncio.gather(
            call.report("b", GOOD),
            call.report("b", GOOD | {"seconds": 2.0}),
            call.ask("GET", "/jobs/j"),
            call.ask("PUT", "/jobs/j", JOB),
            call.page("/metrics"),
        )
    assert reported[0] == other[0] == 507
    assert told == made == (200, before)
    assert 'paceline_reports_total{job="j"} 1.0' in metrics
    assert '<td data-head="rounds">0</td>' in await call.page("/")


async def test_who_waits_hears_of_a_round_that_is_ready_while_its_question_waits_for_the_disk(
    call: Caller,
) -> None:
    """The question comes between two calls that are in one commit."""
    service = call.service
    await service.create("k", Settings.model_validate(JOB | {"workers": 3}))
    secrets = {name: (await service.join("k", name, None, None))[1] for name in "abc"}
    for name in "abc":
        await service.next("k", name, secrets[name], 0.0)
    report = Report(0, 4, 1.0)
    await service.report("k", "a", secrets["a"], report)
    _, part, _ = await asyncio.wait_for(
        asyncio.gather(
            service.report("k", "b", secrets["b"], report),
            service.next("k", "a", secrets["a"], 60.0),
            service.leave("k", "c", secrets["c"]),
        ),
        8.0,
    )
    assert isinstance(part, Part)
    assert part.round == 1


@ONE_JOB_ALONE
async def test_job_made_again_during_a_deadline_check_is_left_alone(call: Caller) -> None:
    await call.next("a")
    for job in "kz":
        await call.create(job)
        assert (await call.next("a", job=job))[0] == 200
    settings = call.service.catalog.running["z"].job.settings

    async def anew() -> None:
        await call.service.delete("z")
        await call.service.create("z", settings)

    call.clock.now += 6.0
    await asyncio.gather(call.service.tick(), anew())
    await asyncio.sleep(0.05)
    assert states(call.service) == killed(call.service)
