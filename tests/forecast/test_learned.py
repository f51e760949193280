"""``narx`` and ``recurrent``: what training gives, when it is trusted, and what a saved model is good for."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from paceline import forecast
from paceline.errors import PacelineError
from paceline.forecast import Reading, learned
from paceline.forecast.learned import BLOCK, LearnedState, load, save
from paceline.forecast.series import Series, bursty, rate, rmse, walk
from paceline.rounds import Array


@pytest.fixture(scope="module")
def busy() -> Series:
    return bursty(np.random.default_rng(11), rounds=900, workers=6)


def after(made: forecast.AnyForecast, series: Series, rounds: int) -> LearnedState:
    state = made.init(series.speed.shape[1:])
    for k in range(1, rounds):
        _, state = made.step(state, Reading(series.speed[k - 1], series.cpu[k], series.memory[k]))
        state = made.train(state)
    return state


def test_the_first_rounds_are_ema(busy: Series) -> None:
    """LB-BSP, section 4.2."""
    narx = walk(forecast.create("narx:warmup=200,gain=0.3"), *busy[:3])
    ema = walk(forecast.create("ema:gain=0.3"), *busy[:3])
    np.testing.assert_array_equal(narx[1:200], ema[1:200])
    assert np.any(narx[200:] != ema[200:])


@pytest.mark.parametrize(
    "name",
    [
        "narx",
        "narx:inputs=8,pooled=false",
        *(pytest.param(name, marks=pytest.mark.nightly) for name in ("narx:inputs=8", "narx:pooled=false")),
    ],
)
def test_narx_learns_what_the_reading_is_worth(name: str, busy: Series) -> None:
    found = rate(
        walk(forecast.create(name + ("," if ":" in name else ":") + "warmup=400"), *busy[:3]), busy.speed
    )
    ema = rate(walk(forecast.create("ema"), *busy[:3]), busy.speed)
    assert busy.expected is not None
    limit = rate(busy.expected, busy.speed)
    assert limit.rmse < found.rmse
    assert ema.rmse - found.rmse > 0.6 * (ema.rmse - limit.rmse)  # most of what there is to gain
    assert found.over_oracle < ema.over_oracle


@pytest.mark.parametrize("cell", ["simple", "lstm"])
def test_recurrent_learns_an_alternation_that_no_average_follows(cell: str) -> None:
    rng = np.random.default_rng(0)
    swing = np.where(np.arange(400) % 2, 80.0, 120.0)[:, None] * rng.uniform(0.99, 1.01, (400, 3))
    found = walk(forecast.create(f"recurrent:cell={cell},warmup=150"), swing)
    assert rmse(found[300:], swing[300:]).max() < 3
    assert rmse(walk(forecast.create("ema"), swing)[300:], swing[300:]).min() > 15


def test_a_drop_in_the_reading_is_believed_before_any_round_is_slow(busy: Series) -> None:
    made = forecast.create("narx:warmup=400,fallback=false")
    state = after(made, busy, 700)
    high, low = np.full(6, 0.9), np.full(6, 0.45)
    for _ in range(5):
        before, state = made.step(state, Reading(state.ema, high, high))
        state = made.train(state)
    dropped, _ = made.step(state, Reading(state.ema, low, high))
    assert np.all(dropped < 0.75 * before)


def test_ema_takes_over_when_readings_turn_to_nonsense(busy: Series) -> None:
    rng = np.random.default_rng(0)
    state = after(forecast.create("narx:warmup=400"), busy, 600)
    made = forecast.create("narx:warmup=400")
    trusted = []
    for _ in range(120):
        speed = 80 * rng.uniform(0.98, 1.02, 6)  # steady, while the meters jump about
        predicted, state = made.step(state, Reading(speed, rng.random(6), rng.random(6)))
        trusted.append(predicted != state.ema)
        state = made.train(state)
    assert not np.any(trusted[-20:])
    frank = forecast.create("narx:warmup=400,fallback=false")
    predicted, later = frank.step(state, Reading(speed, rng.random(6), rng.random(6)))
    assert np.all(predicted != later.ema)  # without the fallback it would go on


def test_narx_predicts_after_500_rounds_by_default(busy: Series) -> None:
    """LB-BSP, section 4.2."""
    narx = walk(forecast.create("narx:fallback=no"), *(each[:520] for each in busy[:3]))
    ema = walk(forecast.create("ema"), busy.speed[:520])
    np.testing.assert_array_equal(narx[1:500], ema[1:500])  # the first 500 rounds
    assert np.all(narx[500:] != ema[500:])


def test_training_stops_after_four_small_gains_in_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """LB-BSP, section 4.2: the loss falls by less than 0.0001 in four consecutive steps."""
    gains = [1.0, 5e-5, 0.0, 9e-5, 1.1e-4, 9.9e-5, 9.9e-5, 9.9e-5, 5e-4, 1e-5, 1e-5, 1e-5, 1e-5, 1.0, 1.0]
    taken: list[float] = []

    def improve(
        network: object, parameters: Array, damping: Array, *rest: object
    ) -> tuple[Array, Array, Array]:
        taken.append(gains[len(taken)])
        return parameters, damping, np.full(len(damping), taken[-1])

    monkeypatch.setattr(learned, "improve", improve)
    made, rng = forecast.create("narx"), np.random.default_rng(0)
    state = made.init((3,))
    for _ in range(4 * BLOCK - 1):  # of which the last 32 have three blocks to train on, up to a new block
        _, state = made.step(state, Reading(rng.uniform(50, 60, 3), rng.random(3), rng.random(3)))
        state = made.train(state)
    assert taken == gains[:13]


def test_training_stops_when_little_is_gained_and_resumes_with_a_new_block() -> None:
    """LB-BSP, section 4.2."""
    rng = np.random.default_rng(0)
    made = forecast.create("narx")
    state, moved = made.init((4,)), []
    for _ in range(400):
        _, state = made.step(state, Reading(rng.uniform(50, 60, 4), rng.random(4), rng.random(4)))
        following = made.train(state)
        moved.append(np.any(following.parameters != state.parameters))
        state = following
    late = np.array(moved[-4 * BLOCK :])
    assert late.any()
    assert late.mean() < 0.5


def test_models_take_turns_where_they_are_many(busy: Series, monkeypatch: pytest.MonkeyPatch) -> None:
    """LB-BSP, Alg. 1, manager, lines 1 to 6."""
    monkeypatch.setattr(learned, "TURN", 2)
    made = forecast.create("narx:pooled=false")
    state = after(made, busy, 4 * BLOCK)
    start = state.parameters
    for k in range(3):
        index = 4 * BLOCK + k
        _, state = made.step(state, Reading(busy.speed[index - 1], busy.cpu[index], busy.memory[index]))
        before, state = state.parameters, made.train(state)
        assert np.any(state.parameters != before, axis=1).sum() <= 2
    moved = np.any(state.parameters != start, axis=1)
    assert start.shape == (6, 17)
    assert moved.sum() >= 4  # 3 rounds of 2 out of 6, but for steps that were not taken


def test_a_state_is_small_steps_of_shared_arrays(busy: Series) -> None:
    """A round copies a block, not the window: what keeps a thousand workers cheap."""
    made = forecast.create("narx")
    state = after(made, busy, 2 * BLOCK + 5)
    _, following = made.step(state, Reading(busy.speed[0], busy.cpu[0], busy.memory[0]))
    assert following.window is state.window


def test_a_saved_model_predicts_after_twenty_rounds(busy: Series, tmp_path: Path) -> None:
    made = forecast.create("narx")
    save(tmp_path / "model.npz", made.network, after(made, busy, 700))
    other = bursty(np.random.default_rng(12), rounds=300, workers=3)
    reused = walk(forecast.create(f"narx:model={tmp_path / 'model.npz'}"), *other[:3])
    each = walk(forecast.create(f"narx:pooled=no,model={tmp_path / 'model.npz'}"), *other[:3])
    ema = walk(forecast.create("ema"), *other[:3])
    np.testing.assert_array_equal(reused[1:20], ema[1:20])
    for found in (reused, each):
        assert rate(found, other.speed, 60).rmse < 0.9 * rate(ema, other.speed, 60).rmse
    assert [p.name for p in tmp_path.iterdir()] == ["model.npz"]


def test_of_many_models_the_most_accurate_is_saved(busy: Series, tmp_path: Path) -> None:
    made = forecast.create("narx:pooled=false")
    state = after(made, busy, 600)
    best = np.argmin(state.wrong[0] / state.wrong[1])
    save(tmp_path / "model.npz", made.network, state)
    np.testing.assert_array_equal(load(tmp_path / "model.npz", made.network), state.parameters[best])


def test_files_that_are_no_model_are_refused(tmp_path: Path, busy: Series) -> None:
    (tmp_path / "text.npz").write_text("hello")
    np.savez(tmp_path / "other.npz", x=np.zeros(3))
    made = forecast.create("narx:inputs=8")
    save(tmp_path / "eight.npz", made.network, after(made, busy, 130))
    whole = (tmp_path / "eight.npz").read_bytes()
    (tmp_path / "half.npz").write_bytes(whole[: len(whole) // 2])
    np.savez(tmp_path / "nan.npz", network=repr(made.network), parameters=np.full(11, np.nan))
    for name, message in [
        ("missing.npz", "is not a saved forecast model"),
        ("text.npz", "is not a saved forecast model"),
        ("other.npz", "is not a saved forecast model"),
        ("half.npz", "is not a saved forecast model"),
        ("eight.npz", r"holds Perceptron\(features=8, hidden=1\), but Perceptron\(features=6, hidden=2\)"),
    ]:
        with pytest.raises(PacelineError, match=message):
            forecast.create(f"narx:model={tmp_path / name}").init((3,))
    with pytest.raises(PacelineError, match="numbers that are not finite"):
        forecast.create(f"narx:inputs=8,model={tmp_path / 'nan.npz'}").init((3,))


@pytest.mark.parametrize(
    "name",
    [
        "narx:inputs=7",
        "narx:hidden=-1",
        "narx:warmup=-1",
        "narx:window=50",
        "recurrent:cell=gru",
        "recurrent:look=0",
    ],
)
def test_options_that_cannot_be_are_refused(name: str) -> None:
    with pytest.raises(PacelineError, match=f"forecast '{name.partition(':')[0]}'"):
        forecast.create(name)
