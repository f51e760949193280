"""A forecast in a thread of its own: what arrives when, settled by events and not by the clock."""

from __future__ import annotations

import os
import threading
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import pytest

from paceline import forecast
from paceline.errors import PacelineError
from paceline.forecast import Reading
from paceline.forecast.background import Background
from paceline.forecast.rating import walk


class Count(NamedTuple):
    rounds: np.ndarray


@dataclass(frozen=True)
class Gated:
    """Predicts the newest speed, once the test lets it; fails on a speed of 13."""

    gate: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    threads: list[int] = field(default_factory=list)

    def init(self, shape: tuple[int, ...]) -> Count:
        return Count(np.zeros(()))

    def step(self, state: Count, reading: Reading) -> tuple[np.ndarray, Count]:
        self.threads.append(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))
        self.gate.acquire()
        if reading.speed[0] == 13:
            raise ZeroDivisionError("thirteen")
        return reading.speed.copy(), Count(state.rounds + 1)


def one(speed: float) -> Reading:
    return Reading(np.array([speed]))


def test_a_slow_forecast_is_one_round_late_and_never_more() -> None:
    gated = Gated()
    with Background(gated, (1,)) as background:
        assert np.isnan(background.step(one(1))[0])  # its own round is not waited for
        gated.gate.release()
        assert background.step(one(2))[0] == 1  # the round before is
        gated.gate.release()
        assert background.step(one(3))[0] == 2
        gated.gate.release()
        assert background.state == Count(np.array(3.0))


def test_waiting_equals_the_forecast_itself() -> None:
    rng = np.random.default_rng(0)
    speed, cpu = rng.uniform(50, 100, (300, 4)), rng.uniform(0.3, 1, (300, 4))
    made = forecast.create("narx:warmup=150,window=192")
    expected = walk(made, speed, cpu, cpu)
    with Background(made, (4,), wait=True) as background:
        for k in range(1, 300):
            found = background.step(Reading(speed[k - 1], cpu[k], cpu[k]))
            np.testing.assert_array_equal(found, expected[k])


def test_the_callers_arrays_may_be_reused() -> None:
    gated = Gated()
    with Background(gated, (1,)) as background:
        speed = np.array([5.0])
        background.step(Reading(speed))
        speed[:] = 99
        gated.gate.release()
        assert background.step(one(6))[0] == 5
        gated.gate.release()


def test_an_error_reaches_the_caller_and_the_thread_lives_on() -> None:
    gated = Gated()
    with Background(gated, (1,), wait=True) as background:
        gated.gate.release(3)
        assert background.step(one(7))[0] == 7
        with pytest.raises(ZeroDivisionError, match="thirteen"):
            background.step(one(13))
        assert background.step(one(8))[0] == 8


def test_the_thread_runs_at_low_priority_and_ends() -> None:
    gated, mine = Gated(), os.getpriority(os.PRIO_PROCESS, 0)
    background = Background(gated, (1,), nice=15)
    gated.gate.release()
    background.step(one(1))
    background.close()
    background.close()
    assert gated.threads == [15]
    assert os.getpriority(os.PRIO_PROCESS, 0) == mine
    assert "paceline-forecast" not in [t.name for t in threading.enumerate()]


def test_a_priority_that_is_none_is_refused() -> None:
    with pytest.raises(PacelineError, match="nice=20"):
        Background(Gated(), (1,), nice=20)
