"""A job's decisions, event by event."""

from __future__ import annotations

import contextlib
import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline import PacelineError, policies
from paceline.client import Part
from paceline.rounds import RoundResult
from paceline.serve import events
from paceline.serve.events import (
    Conflict,
    Departure,
    DropEvent,
    Effect,
    Gone,
    JoinEvent,
    LeaveEvent,
    NotFound,
    Ready,
    Report,
    ReportEvent,
    Settle,
)
from paceline.serve.jobs import Job
from paceline.serve.models import Settings, Waiting
from paceline.tokens import digest
from support.guarantees import guarantee


def started(**changes: Any) -> Job:
    """A job of three workers a, b and c, all there; seconds go by as the tests say."""
    job = Job(Settings.of(**{"batch": 12, "workers": 3, "grace": 1.0} | changes))
    for name in "abc"[: job.settings.workers]:
        join(job, 0.0, name, digest(name))
    return job


def join(job: Job, now: float, name: str, secret: str, place: int | None = None) -> list[Effect]:
    """As the service does: the place is chosen first."""
    return job.handle(JoinEvent(now, name, secret, job.members.place(name, secret, place)))


def reports(job: Job, now: float, name: str, done: Report) -> list[Effect]:
    return job.handle(ReportEvent(now, name, done))


def leave(job: Job, now: float, name: str) -> list[Effect]:
    return job.handle(LeaveEvent(now, name))


def drop(job: Job, now: float, name: str) -> list[Effect]:
    return job.handle(DropEvent(now, name))


def ask(job: Job, now: float, name: str) -> tuple[Part | None, list[Effect]]:
    """As the service does: the worker's part, of a new round where one may be handed out."""
    effects: list[Effect] = []
    if isinstance(answer := job.next(now, name), Settle):
        effects = job.handle(answer)
        answer = job.next(now, name)
    return answer if isinstance(answer, Part) else None, effects


def run(job: Job, now: float, seconds_per_sample: dict[str, float]) -> list[int]:
    """One round in which all report at ``now``; the samples of each."""
    parts = {name: ask(job, now, name)[0] for name in seconds_per_sample}
    for name, pace in seconds_per_sample.items():
        part = parts[name]
        reports(job, now, name, Report(part.round, part.samples, max(pace * part.samples, 1e-9)))
    return [part.samples for part in parts.values()]


def test_the_log_of_a_round() -> None:
    job = Job(Settings.of(batch=12, workers=2, policy="equal"))
    assert join(job, 0.0, "a", digest("a")) == [JoinEvent(0.0, "a", digest("a"), 0)]
    assert ask(job, 0.5, "a") == (None, [])
    assert job.waiting_for() == "1 more worker must join"
    assert join(job, 1.0, "b", digest("b")) == [JoinEvent(1.0, "b", digest("b"), 1), Ready(1.0, 0)]
    part, effects = ask(job, 2.0, "b")
    assert effects == [Settle(2.0, 0, [6, 6])]
    assert part == Part(0, 6, 6, 12, 2, 0.5, 1.0)
    part, effects = ask(job, 2.5, "a")
    assert (part, effects) == (Part(0, 6, 0, 12, 2, 0.5, 1.0), [])
    assert reports(job, 3.0, "a", Report(0, 6, 0.75)) == []
    assert ask(job, 3.0, "a") == (None, [])
    assert job.waiting_for() == "round 0 waits for the report of b"
    closed, ready = reports(job, 4.0, "b", Report(0, 6, 1.5, 0.5))
    assert ready == Ready(4.0, 1), "whoever waits asks again"
    assert isinstance(closed, RoundResult)
    assert (closed.ended, closed.step, closed.seconds) == (4.0, 0, 2.0)
    assert closed.loads.tolist() == [6, 6]
    assert closed.compute.tolist() == [0.75, 1.5]
    assert closed.overhead.tolist() == [0, 0.5]
    assert ask(job, 5.0, "a")[1] == [Settle(5.0, 1, [6, 6])]


def test_speeds_1_2_4_settle_at_their_shares() -> None:
    job = started(batch=700)
    for t in range(6):
        loads = run(job, float(t), {"a": 0.004, "b": 0.002, "c": 0.001})
    assert loads == [100, 200, 400]


def test_the_silent_are_dropped_and_their_share_is_given_to_the_others() -> None:
    job = started(give_up=4.0, grace=1.0)
    for t in range(3):
        run(job, float(t), dict.fromkeys("abc", 0.1))
    assert job.limit() == 1.0, "rounds that took no time at all"
    for name in "abc":
        part, _ = ask(job, 10.0, name)
        assert part.samples == 4
    reports(job, 10.5, "a", Report(3, 4, 0.4))
    reports(job, 10.5, "c", Report(3, 4, 0.4))
    assert drop_silent(job, 11.0) == []
    dropped, closed, _ = drop_silent(job, 11.25)
    assert dropped == Departure(
        11.25, "b", "was dropped in round 3 after 1.2 s of silence; the other workers take its share"
    )
    assert (closed.ended, closed.step) == (11.25, 3)
    np.testing.assert_equal(closed.loads, [4, np.nan, 4])
    part, effects = ask(job, 11.5, "a")
    assert effects == [Settle(11.5, 4, [6, 0, 6])]
    assert part.weight_in_mean == 1.0, "two are left"
    with pytest.raises(Gone, match=r"worker 'b' was dropped in round 3 after 1.2 s of silence.*join again"):
        reports(job, 12.0, "b", Report(3, 4, 0.4))
    join(job, 12.0, "b", digest("b"))
    for name in "ac":
        reports(job, 12.0, name, Report(4, 6, 0.6))
    assert ask(job, 12.5, "b")[1] == [Settle(12.5, 5, [4, 4, 4])], "back with its part at once"


def test_deadlines_follow_the_rounds() -> None:
    job = started(give_up=4.0, grace=1.0, first=60.0)
    assert job.limit() == 60.0
    ask(job, 0.0, "a")
    assert job.silent(60.0) == []
    assert job.silent(60.5) == ["a", "b", "c"]
    for t, name in ((2.0, "a"), (3.0, "b"), (5.0, "c")):
        reports(job, t, name, Report(0, 4, 1.0))
    assert job.limit() == 1.0 + 4.0 * 5.0
    for round in range(1, 9):
        run(job, 100.0 * round, dict.fromkeys("abc", 0.1))
    assert job.limit() == 1.0, "the long round is long ago"


def drop_silent(job: Job, now: float) -> list[Effect]:
    """As the service does from time to time."""
    return [effect for name in job.silent(now) for effect in drop(job, now, name)]


def departed(effects: list[Effect]) -> list[str]:
    return [effect.name for effect in effects if isinstance(effect, Departure)]


def test_pause_between_rounds_drops_no_worker() -> None:
    job = started(first=5.0)
    run(job, 1.0, dict.fromkeys("abc", 0.1))
    assert job.limit() == 1.0
    assert drop_silent(job, 1000.0) == []
    ask(job, 1000.0, "a")
    assert drop_silent(job, 1001.0) == []
    assert departed(drop_silent(job, 1001.5)) == ["a", "b", "c"]


def test_the_newest_plan_at_once() -> None:
    """As in LB-BSP's GPU clusters: nobody waits, and yet all are told the same division."""
    job = started(batch=700, ahead=1)
    paces = {"a": 0.004, "b": 0.002, "c": 0.001}
    loads = []
    for number in range(8):
        now = float(number)
        parts = {}
        for name in paces:  # each asks, and reports, before the next one has even asked
            parts[name], _ = ask(job, now, name)
            assert parts[name].round == number
            reports(job, now, name, Report(number, parts[name].samples, paces[name] * parts[name].samples))
            ahead, _ = ask(job, now, name)
            assert ahead.round == number + 1, "handed out while others have not reported"
        loads.append([part.samples for part in parts.values()])
        assert sum(loads[-1]) == 700
    assert loads[0] == [234, 233, 233]
    assert loads[1] == loads[0], "planned before anybody had reported"
    assert loads[-1] == [100, 200, 400]


def test_no_worker_runs_ahead() -> None:
    job = started(ahead=2)
    for number in range(3):
        reports(job, 1.0, "a", Report(ask(job, 1.0, "a")[0].round, 4, 1.0))
        assert len(job.open) == number + 1
    assert ask(job, 1.0, "a") == (None, [])
    assert job.waiting_for() == "round 0 waits for the report of b, c"


@pytest.mark.parametrize(
    ("report", "words"),
    [
        (Report(0, 4, 1.0), "worker 'a' reports round 0, a past round: expected round 2"),
        (Report(3, 4, 1.0), "a future round: expected round 2"),
        (Report(1, 5, 1.0), "has reported round 1 already, with other figures"),
    ],
)
def test_reports_of_other_rounds_are_refused(report: Report, words: str) -> None:
    job = started()
    run(job, 1.0, dict.fromkeys("abc", 0.1))
    run(job, 2.0, dict.fromkeys("abc", 0.1))
    ask(job, 3.0, "a")
    before = json.dumps(job.state_dict())
    with pytest.raises(Conflict, match=words):
        reports(job, 3.0, "a", report)
    assert json.dumps(job.state_dict()) == before


def test_more_samples_than_planned_are_refused() -> None:
    job = started()
    ask(job, 1.0, "a")
    before = json.dumps(job.state_dict())
    for samples in (5, 2**31 - 1):
        with pytest.raises(
            PacelineError, match=f"samples={samples}: expected at most 4, the plan of round 0"
        ):
            reports(job, 1.0, "a", Report(0, samples, 1.0))
    assert json.dumps(job.state_dict()) == before
    reports(job, 1.0, "a", Report(0, 3, 1.0))


def test_a_repeated_report_changes_nothing() -> None:
    job = started()
    part, _ = ask(job, 1.0, "a")
    report = Report(0, part.samples, 1.0)
    reports(job, 1.0, "a", report)
    before = json.dumps(job.state_dict())
    assert reports(job, 2.0, "a", report) == []
    assert json.dumps(job.state_dict()) == before
    with pytest.raises(Conflict, match="has no part in a round"):
        reports(job, 2.0, "a", Report(1, 4, 1.0))


def test_events_are_read_as_they_were_logged() -> None:
    calls: list[list[Any]] = [
        ["join", 0.5, "a", digest("a"), 1],
        ["reported", 2.0, "a", [0, 4, 1.0, 0.25, None, None]],
        ["settle", 1.0, 0, [4, 4, 4], None],
        ["leave", 3.0, "a"],
        ["drop", 4.0, "b"],
        ["resume", 5.0],
    ]
    found = [events.read(call) for call in calls]
    assert found[0] == JoinEvent(0.5, "a", digest("a"), 1)
    assert found[1] == ReportEvent(2.0, "a", Report(0, 4, 1.0, 0.25))
    assert [json.loads(json.dumps(events.logged(event))) for event in found] == calls


def test_a_worker_takes_another_place_with_its_secret() -> None:
    job = started(workers=4, start=3)
    ask(job, 1.0, "a")
    for name in "bc":
        reports(job, 1.0, name, Report(0, 4, 1.0))
    left, closed, joined, _ = join(job, 2.0, "a", digest("a"), 3)
    assert (left, joined) == (
        Departure(2.0, "a", "has taken another place"),
        JoinEvent(2.0, "a", digest("a"), 3),
    )
    assert isinstance(closed, RoundResult)
    assert sum(ask(job, 3.0, "a")[1][0].loads) == 12


def test_a_repeated_join_changes_nothing() -> None:
    job = started()
    part, _ = ask(job, 1.0, "b")
    before = json.dumps(job.state_dict())
    assert join(job, 2.0, "b", digest("b")) == [JoinEvent(2.0, "b", digest("b"), 1)]
    assert json.dumps(job.state_dict()) == before
    assert ask(job, 3.0, "b") == (part, []), "its part of the round stands"
    assert departed(drop_silent(job, 302.0)) == ["a", "b", "c"]


def test_a_free_place_goes_to_whom_had_it_then_to_new_ones() -> None:
    job = started(start=1)
    leave(job, 1.0, "b")
    leave(job, 2.0, "a")
    assert join(job, 3.0, "x", digest("x")) == [JoinEvent(3.0, "x", digest("x"), 1)], "b is gone longest"
    assert join(job, 3.0, "a", digest("a")) == [JoinEvent(3.0, "a", digest("a"), 0)]
    with pytest.raises(NotFound):
        ask(job, 4.0, "b")


def test_waits_for_workers_whose_limits_hold_the_batch() -> None:
    job = started(limits=((0, 5), (0, 5), (0, 5)))
    run(job, 1.0, dict.fromkeys("abc", 0.1))
    leave(job, 2.0, "b")
    assert ask(job, 2.0, "a") == (None, [])
    assert job.waiting_for().startswith("the workers present cannot hold the batch")
    assert "leave 2 of 12 without a place" in job.waiting_for()
    join(job, 3.0, "d", digest("d"))
    _, (settled,) = ask(job, 3.0, "a")
    assert sum(settled.loads) == 12
    assert max(settled.loads) <= 5


def test_all_workers_leave_and_others_join() -> None:
    job = started()
    run(job, 1.0, {"a": 0.1, "b": 0.2, "c": 0.4})
    for name in "abc":
        leave(job, 2.0, name)
    for name in "xyz":
        join(job, 100.0, name, digest(name))
    _, (settled,) = ask(job, 101.0, "x")
    assert settled.round == 1
    assert sum(settled.loads) == 12
    for name in "xyz":
        reports(job, 102.0, name, Report(1, ask(job, 101.0, name)[0].samples, 1.0))
    assert job.closed == 2


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"policy": "levle"}, "policy 'levle' is unknown"),
        ({"policy": "optimum"}, "only runs in simulations"),
        ({"policy": "factoring"}, "moves work within a round"),
        ({"policy": "level:forecast=magic"}, "magic"),
        ({"workers": 0}, "workers=0: expected 1 or more"),
        ({"batch": 0}, "batch=0"),
        ({"start": 4}, "start=4: expected 1 to 3"),
        ({"limits": ((1, 2),) * 2}, "limits for 2 of 3 workers"),
        ({"limits": ((1, 2),) * 3}, "6 short of the global batch of 12"),
        ({"quantum": 5}, "quantum=5"),
        ({"quantum": 4, "limits": ((0, 5), (0, 5), (0, 3))}, "quantum=4: the most loads hold 8 samples"),
        ({"quantum": 6, "limits": ((1, 12),) * 3}, "quantum=6: the least loads take 18 samples"),
        ({"grace": float("nan")}, "grace=nan"),
    ],
)
def test_settings_that_do_not_fit(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(PacelineError, match=words):
        started(**changes)


def test_forecasts_read_what_is_reported() -> None:
    job = started(batch=120, policy="level:forecast=ratio")
    for t in range(4):
        for name in "abc":
            part, _ = ask(job, float(t), name)
            reports(job, float(t), name, Report(t, part.samples, 0.01 * part.samples, 0.0, 0.5, 0.5))
    part, _ = ask(job, 9.0, "a")
    reports(job, 9.0, "a", Report(4, part.samples, 0.01 * part.samples, 0.0, 0.25, 0.5))
    for name in "bc":
        reports(job, 9.0, name, Report(4, part.samples, 0.01 * part.samples, 0.0, 0.5, 0.5))
    loads = ask(job, 10.0, "a")[1][0].loads
    assert loads[0] < loads[1], "half the processor, half the speed"


def replayed(asked: Settings, log: list[str], snapshot: str | None = None) -> Job:
    """The job after these events, as a service's log has them."""
    job = Job(asked)
    if snapshot is not None:
        job.load_state_dict(json.loads(snapshot))
    for line in log:
        job.handle(events.read(json.loads(line)))
    return job


NAMES = "abcd"
CALLS = st.lists(
    st.tuples(
        st.sampled_from(["join", "ask", "ask", "report", "report", "round", "round", "leave", "tick", "all"]),
        st.sampled_from(NAMES),
        st.floats(0.001, 3.0),
    ),
    min_size=10,
    max_size=60,
)


def served() -> list[str]:
    """The policies that a service can run."""
    names = []
    for name in policies.names():
        with contextlib.suppress(PacelineError):
            Settings.of(batch=30, workers=3, policy=name)
            names.append(name)
    return names


def test_every_policy_for_rounds_run_as_planned_is_served() -> None:
    assert {"abs", "dolbie", "equal", "lbbsp", "level", "ogd"} <= set(served())


@guarantee(
    "A worker that waits for its next part receives it as soon as there is one, after any sequence of calls."
)
@settings(max_examples=150)
@given(
    calls=CALLS,
    policy=st.sampled_from(served()),
    ahead=st.integers(0, 2),
    limited=st.booleans(),
    start=st.integers(1, 3),
    cut=st.integers(0, 60),
)
def test_any_sequence(calls: Any, policy: str, ahead: int, limited: bool, start: int, cut: int) -> None:
    """Plans sum to the batch, within limits, over those present; nobody waits for the absent; restarts agree."""
    limits = ((1, 20), (0, 30), (0, None)) if limited else None
    asked = Settings.of(
        batch=30, workers=3, policy=policy, start=start, limits=limits, ahead=ahead, grace=1.0, first=5.0
    )
    job, now = Job(asked), 0.0
    log: list[str] = []
    snapshot = [json.dumps(job.state_dict()), 0]

    def who_wait() -> set[str]:
        here = [each.name for each in job.members.by_name.values() if each.present]
        return {each for each in here if isinstance(job.next(now, each), Waiting)}

    def call(name: str, *arguments: Any) -> Any:
        before = json.dumps(job.state_dict())
        part, event, waiting = None, None, who_wait()
        try:
            if name == "join":
                event = JoinEvent(*arguments, job.members.place(*arguments[1:]))
            elif name != "ask":
                event = events.NAMES[name](*arguments)
            elif isinstance(answer := job.next(*arguments), Settle):
                event = answer
            effects = [] if event is None else job.handle(event)
            if name == "ask":
                answer = job.next(*arguments)
                part = answer if isinstance(answer, Part) else None
        except PacelineError:
            assert json.dumps(job.state_dict()) == before, "a refusal changes nothing"
            return None
        if event is not None:
            log.append(json.dumps(events.logged(event)))
        if not any(isinstance(each, Ready | Settle | Departure) for each in effects):
            assert waiting <= who_wait(), "nobody is told to look again"
        present = {each.place for each in job.members.by_name.values() if each.present}
        for effect in effects:
            if isinstance(effect, Settle):
                assert sum(effect.loads) == 30
                for place, load in enumerate(effect.loads):
                    assert load == 0 or place in present
                    if limits is not None:
                        assert load <= (limits[place][1] or 30)
        for each in job.open.values():
            assert each.awaited <= present, "waits for nobody who is absent"
            assert each.awaited, "waits for somebody"
        assert len(job.open) <= ahead + 1
        assert present == set(np.flatnonzero(job.members.mask))
        assert len(present) == job.members.count
        return part

    for name in "abc":
        call("join", now, name, digest(name))
    for index, (what, name, amount) in enumerate(calls):
        now += amount
        if what == "join":
            call("join", now, name, digest(name))
        elif what == "tick":
            now += 4 * amount
            for silent in job.silent(now):
                call("drop", now, silent)
        elif what == "report":
            member = job.members.by_name.get(name)
            part = call("ask", now, name)
            if member is not None and part is not None:
                call("reported", now, name, Report(part.round, part.samples, amount))
        elif what == "all":
            for each in NAMES:
                call("ask", now, each)
        elif what == "round":
            for each in NAMES:
                part = call("ask", now, each)
                if part is not None:
                    seconds = amount * (1 + NAMES.index(each)) if part.samples else 0.0
                    call("reported", now, each, Report(part.round, part.samples, seconds))
        else:
            call(what, now, name)
        if index == cut:
            snapshot = [json.dumps(job.state_dict()), len(log)]
    state = json.dumps(job.state_dict())
    assert json.dumps(replayed(asked, log).state_dict()) == state
    assert json.dumps(replayed(asked, log[snapshot[1] :], snapshot[0]).state_dict()) == state
