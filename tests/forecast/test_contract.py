"""What every registered forecast must keep: found through the registry, so a new one is checked by itself."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from paceline import forecast, policies
from paceline.errors import PacelineError
from paceline.forecast import Reading
from paceline.rounds import Cluster, Round

ROUNDS = 150  # enough for every method to have been fitted
TRAINED = [
    f"{name},warmup=0,fallback=false"
    for name in (
        "narx:inputs=6",
        "narx:inputs=8,pooled=false",
        "recurrent:cell=simple",
        "recurrent:cell=lstm",
    )
]


def stream(seed: int, shape: tuple[int, ...], rounds: int = ROUNDS) -> list[Reading]:
    """Readings of a cluster whose processors are shared: speed follows the portion a worker can have."""
    rng = np.random.default_rng(seed)
    base = rng.uniform(50, 200, shape)
    cpu = np.clip(0.6 + 0.1 * np.cumsum(rng.normal(size=(rounds + 1, *shape)), axis=0), 0.1, 1.0)
    memory = rng.uniform(0.2, 0.8, (rounds + 1, *shape))
    speed = base * cpu[:-1] * np.exp(0.05 * rng.normal(size=(rounds, *shape)))
    return [Reading(v, c, m) for v, c, m in zip(speed, cpu[1:], memory[1:], strict=True)]


def walk(made: forecast.AnyForecast, readings: list[Reading], shape: tuple[int, ...]) -> np.ndarray:
    state, out = made.init(shape), []
    for reading in readings:
        predicted, state = made.step(state, reading)
        state = made.train(state)
        out.append(predicted)
    return np.array(out)


@pytest.fixture(params=sorted(forecast.FORECASTS) + TRAINED)
def made(request: pytest.FixtureRequest) -> forecast.AnyForecast:
    return forecast.create(request.param)


def test_predictions_are_positive_and_finite(made: forecast.AnyForecast) -> None:
    out = walk(made, stream(0, (2, 3)), (2, 3))
    assert out.shape == (ROUNDS, 2, 3)
    assert np.all(np.isfinite(out))
    assert np.all(out > 0)


def test_constant_speed_is_predicted_exactly(made: forecast.AnyForecast) -> None:
    speed = np.array([10.0, 300.0, 0.5])
    readings = [Reading(speed, np.full(3, 0.5), np.full(3, 0.25))] * ROUNDS
    np.testing.assert_allclose(walk(made, readings, (3,)), np.tile(speed, (ROUNDS, 1)), rtol=1e-9)


def test_same_input_same_output_and_inputs_unchanged(made: forecast.AnyForecast) -> None:
    readings = stream(1, (4,))
    copies = [Reading(*(a.copy() for a in r)) for r in readings]
    first, second = walk(made, readings, (4,)), walk(made, copies, (4,))
    np.testing.assert_array_equal(first, second)
    for kept, copy in zip(readings, copies, strict=True):
        for a, b in zip(kept, copy, strict=True):
            np.testing.assert_array_equal(a, b)


def test_a_kept_state_replays(made: forecast.AnyForecast) -> None:
    readings = stream(2, (3,))
    state = made.init((3,))
    for reading in readings[:10]:
        state = made.train(made.step(state, reading)[1])
    kept = policies.restore(state, policies.leaves(state))  # saved and loaded: every part is an array
    straight, again = state, kept
    for reading in readings[10:]:
        a, straight = made.step(straight, reading)
        b, again = made.step(again, reading)
        np.testing.assert_array_equal(a, b)
        straight, again = made.train(straight), made.train(again)
    c, _ = made.step(kept, readings[10])
    d, _ = made.step(state, readings[10])
    np.testing.assert_array_equal(c, d)


def test_relabelled_workers_are_relabelled_predictions(made: forecast.AnyForecast) -> None:
    order = np.array([2, 0, 3, 1])
    readings = stream(3, (4,))
    moved = [Reading(*(a[order] for a in r)) for r in readings]
    np.testing.assert_allclose(walk(made, moved, (4,)), walk(made, readings, (4,))[:, order], rtol=1e-7)


def test_realizations_together_equal_one_by_one(made: forecast.AnyForecast) -> None:
    readings = stream(4, (3, 4))
    together = walk(made, readings, (3, 4))
    for r in range(3):
        alone = walk(made, [Reading(*(a[r] for a in x)) for x in readings], (4,))
        np.testing.assert_allclose(together[:, r], alone, rtol=1e-7)


def test_faster_units_scale_the_prediction(made: forecast.AnyForecast) -> None:
    readings = stream(5, (3,))
    scaled = [r._replace(speed=r.speed * 1000) for r in readings]
    np.testing.assert_allclose(walk(made, scaled, (3,)), 1000 * walk(made, readings, (3,)), rtol=1e-6)


def test_absence_does_no_harm(made: forecast.AnyForecast) -> None:
    readings = stream(6, (3,))
    gaps = [
        r._replace(speed=np.where([5 <= k < 9, False, k < 4], np.nan, r.speed))
        for k, r in enumerate(readings)
    ]
    out = walk(made, gaps, (3,))
    assert np.all(np.isnan(out[:4, 2]))  # never seen yet
    assert np.all(np.isfinite(out[4:]))
    assert np.all(np.isfinite(out[:, :2]))
    assert np.all(out[5:, 0] > 0)


@settings(deadline=None, max_examples=40)
@given(data=st.data(), name=st.sampled_from(sorted(forecast.FORECASTS)))
def test_workers_with_reports_have_a_positive_prediction(data: st.DataObject, name: str) -> None:
    rounds, workers = 40, 3
    odd = st.sampled_from([np.nan, 0.0, -1.0, np.inf])
    speed = data.draw(
        arrays(float, (rounds, workers), elements=st.floats(1e-6, 1e9) | odd, fill=st.nothing())
    )
    portion = data.draw(arrays(float, (rounds, workers), elements=st.floats(0, 1) | st.just(np.nan)))
    out = walk(
        forecast.create(name), [Reading(v, c, c) for v, c in zip(speed, portion, strict=True)], (workers,)
    )
    been = np.cumsum(np.isfinite(speed) & (speed > 0), axis=0) > 0
    assert np.all(np.isnan(out[~been]))
    assert np.all(np.isfinite(out[been]) & (out[been] > 0))


@pytest.mark.parametrize("name", [*sorted(forecast.FORECASTS), "narx:pooled=no"])
def test_policy_continues_from_a_stored_state(name: str) -> None:
    policy = policies.create("level:forecast=" + name.replace(",", ";"), Cluster(3, 64))
    rounds = [
        Round(np.full(3, 1 / 3), 64 / 3 / r.speed, 64, cpu=r.cpu, memory=r.memory)
        for r in stream(9, (3,), 40)
    ]
    _, state = policy.init()
    for each in rounds[:20]:
        state = policy.train(policy.step(state, each)[1])
    stored = [leaf.tolist() for leaf in policies.leaves(state)]
    again = policies.restore(policy.init()[1], stored)
    for each in rounds[20:]:
        plan, state = policy.step(state, each)
        other, again = policy.step(again, each)
        np.testing.assert_array_equal(plan.shares, other.shares)
        state, again = policy.train(state), policy.train(again)


def test_no_cpu_or_memory_reading_is_no_error(made: forecast.AnyForecast) -> None:
    readings = [Reading(r.speed) for r in stream(7, (3,))]
    assert np.all(np.isfinite(walk(made, readings, (3,))))


def test_readings_change_forecasts_that_need_them(made: forecast.AnyForecast) -> None:
    readings = stream(8, (3,))
    without = walk(made, [Reading(r.speed) for r in readings], (3,))
    begun = getattr(made, "warmup", 0) < ROUNDS  # before, even narx is a moving average
    same = np.array_equal(walk(made, readings, (3,)), without)
    assert same != (made.needs_readings and begun)


def test_policies_ask_for_the_readings_their_forecast_needs() -> None:
    cluster = Cluster(2, 8)
    assert policies.create("level:forecast=narx:inputs=8;pooled=no", cluster).needs_readings  # type: ignore[attr-defined]
    assert policies.create("lbbsp-cpu:forecast=ratio", cluster).needs_readings  # type: ignore[attr-defined]
    assert not policies.create("lbbsp-cpu", cluster).needs_readings  # type: ignore[attr-defined]


def test_unknown_names_raise_one_error() -> None:
    with pytest.raises(PacelineError, match="forecast 'oracle' is unknown; expected one of "):
        forecast.create("oracle")
