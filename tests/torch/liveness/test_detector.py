"""Who counts as silent: who gave no other heartbeat for long enough, in looks as well as in seconds."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.torch.liveness.detector import EVERY, LOOKS, PAUSES, UNBORN, FailureDetector


def test_who_gives_no_other_sign_is_silent_and_who_has_not_begun_is_not() -> None:
    detector = FailureDetector(dead=1.0)
    now, found = 100.0, dict[int, float]()
    for look in range(200):
        now += EVERY
        found = detector.silent(now, {0: b"%d" % (look + 1), 1: b"7", 2: UNBORN})
        if found:
            break
    assert set(found) == {1}
    assert 1.0 <= found[1] <= 1.0 + EVERY
    assert 1.0 <= look * EVERY <= 1.0 + 2 * EVERY  # the first look is the first that knows the sign


def test_one_that_gave_a_sign_again_starts_at_nothing() -> None:
    detector = FailureDetector(dead=4 * EVERY)
    now = 100.0
    for sign in [b"1", b"1", b"1", b"1", b"2", b"2", b"2", b"2"]:
        now += EVERY
        assert not detector.silent(now, {5: sign})
    assert set(detector.silent(now + 2 * EVERY, {5: b"2"})) == {5}


def test_one_that_left_and_came_again_starts_at_nothing() -> None:
    detector = FailureDetector(dead=4 * EVERY)
    now = 100.0
    for there in [True] * 4 + [False] + [True] * 4:
        now += EVERY
        assert not detector.silent(now, {5: b"1"} if there else {})


def test_whoever_looks_and_stood_still_itself_blames_nobody() -> None:
    """A pause between two looks counts for little, and there are LOOKS looks in any case."""
    detector = FailureDetector(dead=EVERY)
    now = 100.0
    detector.silent(now, {0: b"1"})
    for looks in range(1, LOOKS + 1):
        now += 1000.0
        assert bool(detector.silent(now, {0: b"1"})) == (looks >= LOOKS)
    patient = FailureDetector(dead=100.0)
    patient.silent(now, {0: b"1"})
    for _ in range(2 * LOOKS):
        now += 1000.0
        assert not patient.silent(now, {0: b"1"})


@given(
    dead=st.floats(0.05, 1.0),
    looks=st.lists(st.tuples(st.floats(0.0, 2.0), st.tuples(*[st.booleans()] * 3)), max_size=60),
)
def test_the_verdict_is_a_count_from_the_last_sign(dead: float, looks: list[tuple[float, Any]]) -> None:
    """Whoever gave no other sign for long enough, and at LOOKS looks, is silent; nobody else is."""
    detector, now, signs = FailureDetector(dead), 1000.0, [1, 1, 1]
    detector.silent(now, dict(enumerate(signs)))
    counted: list[list[float]] = [[], [], []]  # seconds between looks since the last sign of each
    for pause, beats in looks:
        now += pause
        for number, beat in enumerate(beats):
            signs[number] += beat
            counted[number] = [] if beat else [*counted[number], min(pause, PAUSES * EVERY)]
        expected = {n: sum(c) for n, c in enumerate(counted) if len(c) >= LOOKS and sum(c) >= dead + 1e-9}
        found = detector.silent(now, dict(enumerate(signs)))
        assert found.keys() >= expected.keys()
        assert all(len(counted[n]) >= LOOKS and sum(counted[n]) >= dead - 1e-9 for n in found)
        assert found == pytest.approx({n: sum(counted[n]) for n in found})
