"""Who is missed and when, without any clock: the judge is told how many seconds went by."""

from __future__ import annotations

import threading

import pytest

from paceline.errors import PacelineError
from paceline.torch.liveness import stall
from paceline.torch.liveness.calls import Calls
from paceline.torch.liveness.detector import LOOKS, Awake, FailureDetector
from paceline.torch.liveness.stall import Failure, Missing, Stall, StallTimeout, View
from support.guarantees import guarantee


def judged(judge: StallTimeout, views: list[View], step: int = 0, waits: bool = True) -> list[Missing]:
    """What the judge tells who sees one of these each second."""
    told = [judge.judge(view, step, waits, 1.0) for view in views]
    return [missing for missing in told if missing is not None]


def silent(rank: int, seconds: float, number: int) -> View:
    return View(number, {rank: seconds}, -1, (rank,))


@guarantee(
    "A silent rank is named after `patience` seconds (30) and after twice the time, under every policy; a "
    "late rank is named as late."
)
def test_a_silent_rank_is_missed_in_the_first_round_and_again_after_twice_the_time() -> None:
    told = judged(StallTimeout(0, 30.0), [silent(2, float(s), s) for s in range(130)])
    assert [(missing.round, missing.ranks, missing.seconds) for missing in told] == [
        (0, [2], 30.0),
        (0, [2], 60.0),
        (0, [2], 120.0),
    ]
    assert "rank 2 has given no heartbeat for 30 s in round 0" in str(told[0])


def test_rank_0_is_missed_when_it_no_longer_looks_and_what_it_wrote_is_old() -> None:
    told = judged(StallTimeout(1, 30.0), [silent(2, 29.0, 7)] * 40)
    assert [(missing.ranks, missing.seconds) for missing in told] == [([0], 30.0)]
    assert judged(StallTimeout(0, 30.0), [silent(2, 29.0, 7)] * 40) == []  # that is rank 0 itself


def test_a_rank_0_that_has_ended_in_good_order_is_not_missed() -> None:
    assert judged(StallTimeout(1, 30.0), [View(7, left=(0,))] * 400) == []


def test_a_rank_that_lives_is_missed_only_after_many_times_that_and_many_rounds() -> None:
    views = [View(second, {}, 4, (1,)) for second in range(1000)]
    (first, second) = judged(StallTimeout(0, 30.0), views, step=5)
    assert (first.ranks, first.seconds, first.lives) == ([1], 300.0, True)
    assert second.seconds == 600.0
    assert "rank 1 has not ended its part of round 5 300 s after this rank did, but gives heartbeats" in str(
        first
    )
    judge = StallTimeout(0, 30.0)
    assert judged(judge, [View(second, {}, 3, (1,)) for second in range(50)], 4, waits=False) == []
    (only,) = judged(judge, views[:900], step=5)
    assert only.seconds == 500.0


@guarantee("Compiling, evaluating, checkpoints or a machine that was suspended cause no warning.")
def test_compiling_evaluating_and_checkpoints_are_no_alarm() -> None:
    """All ranks live: they all compile at once, or four minutes pass on one of them while the others wait."""
    assert judged(StallTimeout(0), [View(s, {}, -1, (0, 1)) for s in range(10_000)], waits=False) == []
    assert judged(StallTimeout(0), [View(s, {}, 4, (1,)) for s in range(240)], step=5) == []


@guarantee("Compiling, evaluating, checkpoints or a machine that was suspended cause no warning.")
def test_a_machine_that_stood_still_blames_nobody() -> None:
    """Every process slept for an hour; each counts but a few seconds of it."""
    detector, judge = FailureDetector(1.5, every=0.5), StallTimeout(1, 30.0)
    awake, now, number = Awake(0.5, 0.0), 0.0, 1
    for look in range(1, 50):
        now += 3600.0 if look == 20 else 0.5
        number = look if look != 20 else number
        view = View(look, detector.silent(now, {0: look, 1: number}))
        assert judge.judge(view, 0, True, awake.since(now)) is None


def test_silence_is_counted_from_the_last_sign_and_needs_several_looks() -> None:
    detector = FailureDetector(1.0, every=5.0)
    assert detector.silent(0.0, {0: 1, 1: 1, 2: 1}) == {}
    assert detector.silent(10.0, {0: 2, 1: 1, 2: 1}) == {}
    for look in range(LOOKS - 2):
        assert detector.silent(10.5 + look, {0: 3, 1: 1, 2: 1}) == {}
    assert list(detector.silent(15.0, {0: 4, 1: 1, 2: 2})) == [1]
    assert detector.silent(16.0, {0: 5, 1: 2, 2: 3}) == {}


def test_a_failure_that_was_told_comes_before_the_silence_after_it() -> None:
    failure = Failure(2, "failed in round 3: KeyError: 'image'")
    views = [View(s, {2: float(s)}, 2, (2,), (), failure) for s in range(40)]
    (missing,) = judged(StallTimeout(0, 30.0), views, step=3)
    assert str(missing).startswith("rank 2 failed in round 3: KeyError: 'image'; end the run")


@pytest.mark.parametrize("value", [0, -1, float("nan"), "60", None, True])
def test_patience_is_a_positive_number_of_seconds(value: object) -> None:
    with pytest.raises(PacelineError, match="expected a positive number of seconds"):
        stall.check(value)  # type: ignore[arg-type]


def test_what_to_do_about_missing_ranks_is_checked() -> None:
    with pytest.raises(PacelineError, match="stall='raise': expected 'warn', 'end', a function"):
        Stall("raise")
    with pytest.warns(RuntimeWarning, match="rank 3 has given no heartbeat"):
        Stall.of("warn").react(Missing(0, [3], 31.0, False))


def test_a_call_that_hangs_is_left_alone_after_its_time() -> None:
    calls, never = Calls("hanging"), threading.Event()
    with pytest.raises(TimeoutError):
        calls.within(0.05, never.wait)
    never.set()
    assert calls.within(5.0, lambda: "goes on") == "goes on"
    with pytest.raises(ZeroDivisionError):
        calls.within(5.0, lambda: 1 // 0)
    calls.close()
