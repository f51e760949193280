"""``last`` and ``ema``: by hand."""

from __future__ import annotations

import numpy as np
import pytest

from paceline import forecast
from paceline.errors import PacelineError
from paceline.forecast import Reading


def predictions(name: str, speeds: list[float]) -> list[float]:
    made = forecast.create(name)
    state, out = made.init((1,)), []
    for speed in speeds:
        predicted, state = made.step(state, Reading(np.array([speed])))
        out.append(float(predicted[0]))
    return out


def test_last_repeats_the_newest_reading_and_keeps_it_over_a_gap() -> None:
    """LB-BSP, Table 3 (memoryless)."""
    assert predictions("last", [10, 30, np.nan, 0.0, 20]) == [10, 30, 30, 30, 20]


def test_ema_by_hand() -> None:
    """LB-BSP, Table 3 (EMA): a fifth of the newest by default."""
    assert predictions("ema", [10, 20, np.nan, 2]) == pytest.approx([10, 12, 12, 10])


def test_ema_of_seconds_is_the_harmonic_mean() -> None:
    # seconds per sample 0.1, then 0.1 + 0.5 (0.5 - 0.1) = 0.3
    assert predictions("ema:gain=0.5,of=seconds", [10, 2]) == pytest.approx([10, 1 / 0.3])


def test_ema_of_seconds_is_unbiased_for_time() -> None:
    speeds = 100 / np.random.default_rng(0).uniform(0.5, 1.5, 20_000)  # mean seconds per sample: 0.01
    harmonic = predictions("ema:gain=0.001,of=seconds", list(speeds))[-1]
    plain = predictions("ema:gain=0.001", list(speeds))[-1]
    assert harmonic == pytest.approx(100, rel=0.03)
    assert plain > 105  # E[1/t] > 1/E[t]: promises more than the worker keeps


@pytest.mark.parametrize("gain", [0, -1, 1.5])
def test_a_gain_that_is_no_weight_is_refused(gain: float) -> None:
    with pytest.raises(PacelineError, match="expected 0 < gain <= 1"):
        forecast.create(f"ema:gain={gain}")
