"""``arima``: the fit against SciPy on the definition, known processes, and the forecast by hand."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.optimize import minimize

from paceline import forecast
from paceline.errors import PacelineError
from paceline.forecast import Reading
from paceline.forecast.arima import errors, fit


def process(seed: int, ar: list[float], ma: float, rounds: int = 300) -> np.ndarray:
    rng = np.random.default_rng(seed)
    e = rng.normal(size=rounds)
    z = np.zeros(rounds)
    for t in range(2, rounds):
        z[t] = ar[0] * z[t - 1] + ar[1] * z[t - 2] + e[t] + ma * e[t - 1]
    return z


def squares(z: np.ndarray, a1: float, a2: float, theta: float) -> float:
    """The sum of squares by its definition, one number at a time."""
    e, total = 0.0, 0.0
    for t in range(2, len(z)):
        e = z[t] - a1 * z[t - 1] - a2 * z[t - 2] - theta * e
        total += e * e
    return total


@pytest.mark.parametrize(
    ("seed", "ar", "ma"), [(0, [0.5, 0.2], 0.4), (1, [-0.6, -0.3], -0.7), (2, [0.1, 0.0], 0.0)]
)
def test_fit_against_scipy(seed: int, ar: list[float], ma: float) -> None:
    """LB-BSP, Table 3 (ARIMA)."""
    z = process(seed, ar, ma, rounds=200)
    found, theta = fit(z[:, None], 2, 1)
    ours = squares(z, found[0, 0], found[1, 0], theta[0])
    theirs = min(
        (
            minimize(
                lambda b: squares(z, b[0], b[1], 0.98 * np.tanh(b[2])), [0.0, 0.0, start],
                method="Nelder-Mead", options={"xatol": 1e-6, "fatol": 1e-8, "maxiter": 2000},
            )
            for start in (-1.0, 0.0, 1.0)
        ),
        key=lambda result: result.fun,
    )  # fmt: skip
    assert ours <= theirs.fun * (1 + 1e-5)
    assert [found[0, 0], found[1, 0], theta[0]] == pytest.approx(
        [theirs.x[0], theirs.x[1], 0.98 * np.tanh(theirs.x[2])], abs=0.01
    )
    assert errors(z[:, None], found, theta)[:, 0] @ errors(z[:, None], found, theta)[:, 0] == pytest.approx(
        ours
    )


def test_fit_recovers_the_process_that_made_the_series() -> None:
    z = process(5, [0.5, -0.3], 0.6, rounds=20_000)
    ar, theta = fit(z[:, None], 2, 1)
    assert [ar[0, 0], ar[1, 0], theta[0]] == pytest.approx([0.5, -0.3, 0.6], abs=0.03)


def test_the_moving_average_stays_invertible() -> None:
    rng = np.random.default_rng(0)
    # Differenced too often: theta wants to be -1 or beyond.
    twice = np.diff(rng.normal(size=(300, 4)), 2, axis=0)
    _, theta = fit(twice, 0, 1)
    assert np.all(np.abs(theta) <= 0.98)


def test_a_quadratic_is_continued_exactly() -> None:
    """d = 2 without noise: the second difference is constant, and so is its forecast with ar = (1, 0)."""
    speed = 50 + 0.02 * np.arange(60.0) ** 2
    made = forecast.create("arima:q=0,p=1,refit=1")
    state = made.init((1,))
    for v in speed:
        predicted, state = made.step(state, Reading(np.array([v])))
        state = made.train(state)
    assert predicted[0] == pytest.approx(50 + 0.02 * 60**2, rel=1e-6)


def test_wild_series_stay_within_sight() -> None:
    rng = np.random.default_rng(3)
    made = forecast.create("arima")
    state = made.init((50,))
    seen = []
    for _ in range(150):
        speed = 100 * np.exp(rng.standard_t(1.5, size=50).clip(-3, 3))
        seen.append(speed)
        predicted, state = made.step(state, Reading(speed))
        state = made.train(state)
        assert np.all(predicted <= 2 * np.max(seen, axis=0))
        assert np.all(predicted >= 0.5 * np.min(seen, axis=0) * (1 - 1e-12))


@pytest.mark.parametrize("name", ["arima:q=2", "arima:p=-1", "arima:window=10", "arima:refit=0"])
def test_orders_that_cannot_be_are_refused(name: str) -> None:
    with pytest.raises(PacelineError, match="forecast 'arima': "):
        forecast.create(name)
