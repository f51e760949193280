"""Who is missed and when, without any clock: the judge is told how many seconds went by."""

from __future__ import annotations

import threading

import pytest

from paceline.errors import PacelineError
from paceline.torch.liveness import patience
from paceline.torch.liveness.board import AFTER, Failure, Sight, Silence
from paceline.torch.liveness.calls import Calls
from paceline.torch.liveness.patience import Missing, Patience


def judged(judge: Patience, sights: list[Sight], step: int = 0, waits: bool = True) -> list[Missing]:
    """What the judge tells who sees one of these each second."""
    told = [judge.judge(sight, step, waits, 1.0) for sight in sights]
    return [missing for missing in told if missing is not None]


def silent(rank: int, seconds: float, number: int) -> Sight:
    return Sight(number, {rank: seconds}, -1, (rank,))


def test_a_silent_rank_is_missed_in_the_first_round_and_again_after_twice_the_time() -> None:
    told = judged(Patience(0, 30.0), [silent(2, float(s), s) for s in range(130)])
    assert [(missing.round, missing.ranks, missing.seconds) for missing in told] == [
        (0, [2], 30.0),
        (0, [2], 60.0),
        (0, [2], 120.0),
    ]
    assert "rank 2 has given no sign of life for 30 s in round 0" in str(told[0])


def test_rank_0_is_missed_when_it_no_longer_looks_and_what_it_wrote_is_old() -> None:
    told = judged(Patience(1, 30.0), [silent(2, 29.0, 7)] * 40)
    assert [(missing.ranks, missing.seconds) for missing in told] == [([0], 30.0)]
    assert judged(Patience(0, 30.0), [silent(2, 29.0, 7)] * 40) == []  # that is rank 0 itself


def test_a_rank_0_that_has_ended_in_good_order_is_not_missed() -> None:
    assert judged(Patience(1, 30.0), [Sight(7, left=(0,))] * 400) == []


def test_a_rank_that_lives_is_missed_only_after_many_times_that_and_many_rounds() -> None:
    sights = [Sight(second, {}, 4, (1,)) for second in range(1000)]
    (first, second) = judged(Patience(0, 30.0), sights, step=5)
    assert (first.ranks, first.seconds, first.lives) == ([1], 300.0, True)
    assert second.seconds == 600.0
    assert (
        "rank 1 has not ended its part of round 5 300 s after this rank did, but gives signs of life"
        in str(first)
    )
    judge = Patience(0, 30.0)
    judge.round_over(50.0)
    (only,) = judged(judge, sights[:900], step=5)
    assert only.seconds == 500.0


def test_compiling_evaluating_and_checkpoints_are_no_alarm() -> None:
    """All ranks live: they all compile at once, or four minutes pass on one of them while the others wait."""
    assert judged(Patience(0), [Sight(s, {}, -1, (0, 1)) for s in range(10_000)], waits=False) == []
    assert judged(Patience(0), [Sight(s, {}, 4, (1,)) for s in range(240)], step=5) == []


def test_a_machine_that_stood_still_blames_nobody() -> None:
    """Every process slept for an hour; each counts but a few seconds of it."""
    silence = Silence(2, least=1.5)
    judge = Patience(1, 30.0)
    numbers = [1, 1]
    for look in range(1, 50):
        numbers = [look, look if look != 20 else numbers[1]]
        seconds = 1.5 if look == 20 else 0.5
        sight = Sight(look, dict(silence.look(numbers, seconds)))
        assert judge.judge(sight, 0, True, seconds) is None


def test_silence_is_counted_from_the_last_sign_and_needs_several_looks() -> None:
    silence = Silence(3, least=1.0)
    silence.look([1, 1, 1], 0.5)
    assert silence.look([2, 1, 1], 10.0) == []
    for _ in range(AFTER - 2):
        assert silence.look([3, 1, 1], 0.5) == []
    assert [rank for rank, _ in silence.look([4, 1, 2], 0.5)] == [1]
    assert silence.look([5, 2, 3], 0.5) == []


def test_a_failure_that_was_told_comes_before_the_silence_after_it() -> None:
    failure = Failure(2, "failed in round 3: KeyError: 'image'")
    sights = [Sight(s, {2: float(s)}, 2, (2,), (), failure) for s in range(40)]
    (missing,) = judged(Patience(0, 30.0), sights, step=3)
    assert str(missing).startswith("rank 2 failed in round 3: KeyError: 'image'; end the run")


@pytest.mark.parametrize("value", [0, -1, float("nan"), "60", None, True])
def test_patience_is_a_positive_number_of_seconds(value: object) -> None:
    with pytest.raises(PacelineError, match="expected a positive number of seconds"):
        patience.check(value)  # type: ignore[arg-type]


def test_what_to_do_about_missing_ranks_is_checked() -> None:
    with pytest.raises(PacelineError, match="on_missed='raise': expected 'warn', 'end' or a function"):
        patience.answer("raise")
    with pytest.warns(RuntimeWarning, match="rank 3 has given no sign of life"):
        patience.answer("warn")(Missing(0, [3], 31.0, False))


def test_a_call_that_hangs_is_left_alone_after_its_time() -> None:
    calls, never = Calls("hanging"), threading.Event()
    with pytest.raises(TimeoutError):
        calls.within(0.05, never.wait)
    never.set()
    assert calls.within(5.0, lambda: "goes on") == "goes on"
    with pytest.raises(ZeroDivisionError):
        calls.within(5.0, lambda: 1 // 0)
    calls.close()
