"""Ratings by hand, the series they are taken on, and ``ratio``."""

from __future__ import annotations

import numpy as np
import pytest

from paceline import forecast
from paceline.errors import PacelineError
from paceline.forecast import Reading
from paceline.forecast.series import bursty, google2011, rate, recorded, rmse, seconds, walk
from paceline.papers import data_folder
from support.skips import with_data


def test_seconds_by_hand() -> None:
    speed = np.array([1.0, 3.0])
    assert seconds(np.ones(2), speed) == pytest.approx(0.5)  # the slow one takes half a sample at 1 a second
    assert seconds(speed, speed) == pytest.approx(0.25)  # 1 / (1 + 3)
    assert seconds(np.array([3.0, 1.0]), speed) == pytest.approx(0.75)


def test_the_absent_take_nothing_and_the_unknown_take_the_mean() -> None:
    speed = np.array([[2.0, 2.0, np.nan], [2.0, 2.0, 4.0], [1.0, 1.0, 1.0]])
    weights = np.array([[1.0, 1.0, 50.0], [1.0, 3.0, np.nan], [np.nan, np.nan, np.nan]])
    np.testing.assert_allclose(seconds(weights, speed), [0.25, 0.25, 1 / 3])


def test_rating_of_the_truth_is_the_oracle() -> None:
    speed = np.random.default_rng(0).uniform(10, 100, (50, 4))
    truth = rate(speed, speed, skip=10)
    assert truth.rmse == 0
    assert truth.over_oracle == pytest.approx(1)
    assert truth.time < 1
    equal = rate(np.ones_like(speed), speed, skip=10)
    assert equal.time == pytest.approx(1)
    assert equal.over_oracle == pytest.approx(1 / truth.time)


def test_rmse_leaves_out_rounds_without_either() -> None:
    predicted = np.array([[np.nan, 3.0], [2.0, 5.0], [4.0, 1.0]])
    speed = np.array([[1.0, np.nan], [1.0, 2.0], [1.0, 5.0]])
    np.testing.assert_allclose(rmse(predicted, speed), [np.sqrt((1 + 9) / 2), np.sqrt((9 + 16) / 2)])


def test_a_walk_looks_at_nothing_to_come() -> None:
    series = bursty(np.random.default_rng(0), rounds=40, workers=2)
    for name in ("last", "ema", "ratio"):
        whole = walk(forecast.create(name), *series[:3])
        spoilt = [
            np.where(np.arange(40)[:, None] >= k, 0.5, x) for x, k in zip(series, (25, 26, 26), strict=False)
        ]
        np.testing.assert_array_equal(walk(forecast.create(name), *spoilt)[:26], whole[:26])


def test_ratio_by_hand() -> None:
    made = forecast.create("ratio:gain=0.5")
    state = made.init((1,))
    for speed, cpu, expected in [(80.0, 0.8, 80.0), (60.0, 0.4, 0.4 * (100 + 75) / 2), (np.nan, 0.8, 70.0)]:
        predicted, state = made.step(state, Reading(np.array([speed]), np.array([cpu])))
        assert predicted[0] == pytest.approx(expected)
    # no reading for the next round: the mean speed, 0.5 (70 + 35)
    predicted, state = made.step(state, Reading(np.array([35.0]), np.array([np.nan])))
    assert predicted[0] == pytest.approx(52.5)


def test_bursty_series_has_bursts() -> None:
    series = bursty(np.random.default_rng(0), rounds=4000, workers=5, stay=40)
    assert series.expected is not None
    jumps = np.abs(np.diff(np.log(series.expected), axis=0)) > 1e-12
    # processors jump every 40 rounds; memory too, but only the 1 in 15 below 0.3 slow anything
    assert jumps.mean() == pytest.approx((1 + 2 / 15) / 40, rel=0.15)
    assert np.all((series.cpu > 0) & (series.cpu <= 1))
    np.testing.assert_allclose((series.speed / series.expected).mean(), 1, atol=0.01)
    again = bursty(np.random.default_rng(0), rounds=4000, workers=5, stay=40)
    np.testing.assert_array_equal(series.speed, again.speed)


def test_missing_series_are_named(tmp_path: object) -> None:
    with pytest.raises(PacelineError, match="is missing; set PACELINE_DATA"):
        recorded(tmp_path)  # type: ignore[arg-type]


@with_data("traces")
def test_the_recorded_series() -> None:
    lagged = recorded(data_folder())
    same = recorded(data_folder(), same_step=True)
    assert lagged.speed.shape == (1237, 2)
    np.testing.assert_array_equal(lagged.cpu[1:], same.cpu[:-1])
    assert np.corrcoef(same.speed[:, 0], same.cpu[:, 0])[0, 1] > 0.95


@with_data("traces")
def test_the_google_series() -> None:
    pytest.importorskip("pyarrow")
    series = google2011(data_folder(), np.random.default_rng(0), workers=32, hold=3)
    assert series.speed.shape == (864, 32)
    assert np.all(np.isfinite(series.speed) & (series.speed > 0))
