"""Levenberg-Marquardt on many models at once: where it stops, SciPy finds nothing better."""

from __future__ import annotations

import numpy as np
from scipy.optimize import minimize

from paceline.forecast.learned import DECAY, improve
from paceline.forecast.networks import Perceptron

NETWORK = Perceptron(3, 2)


def problem(models: int = 4, samples: int = 80) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    teacher = rng.normal(size=(models, NETWORK.parameters))
    inputs = rng.normal(size=(models, samples, 3))
    targets = NETWORK.forward(teacher, inputs) + 0.1 * rng.normal(size=(models, samples))
    weights = (rng.random((models, samples)) < 0.8).astype(float)
    start = np.stack([NETWORK.draw(np.random.default_rng(k)) for k in range(models)])
    return start, inputs, targets, weights


def loss(parameters: np.ndarray, inputs: np.ndarray, targets: np.ndarray, weights: np.ndarray) -> float:
    """The definition, for one model."""
    wrong = NETWORK.forward(parameters[None], inputs[None])[0] - targets
    return float((weights * wrong**2).sum() / weights.sum() + DECAY * parameters @ parameters)


def test_steps_never_raise_the_loss_and_end_in_a_minimum() -> None:
    parameters, inputs, targets, weights = problem()
    damping = np.ones(len(parameters))
    before = [loss(*case) for case in zip(parameters, inputs, targets, weights, strict=True)]
    for _ in range(150):
        parameters, damping, gained = improve(NETWORK, parameters, damping, inputs, targets, weights)
        now = [loss(*case) for case in zip(parameters, inputs, targets, weights, strict=True)]
        np.testing.assert_allclose(np.array(before) - now, gained, atol=1e-12)
        assert np.all(gained >= 0)
        before = now
    for k in range(len(parameters)):
        better = minimize(loss, parameters[k], args=(inputs[k], targets[k], weights[k]), method="BFGS")
        assert before[k] <= better.fun * (1 + 1e-4)


def test_models_together_are_models_alone() -> None:
    parameters, inputs, targets, weights = problem()
    damping = np.array([1e-3, 0.1, 1.0, 10.0])
    together, *_ = improve(NETWORK, parameters, damping, inputs, targets, weights)
    for k in range(4):
        one = [each[k : k + 1] for each in (parameters, damping, inputs, targets, weights)]
        alone, *_ = improve(NETWORK, *one)
        np.testing.assert_allclose(together[k], alone[0], rtol=1e-9)


def test_samples_without_weight_count_for_nothing() -> None:
    parameters, inputs, targets, weights = problem()
    spoilt = np.where(weights > 0, targets, 1e6)
    damping = np.ones(4)
    kept, *_ = improve(NETWORK, parameters, damping, inputs, targets, weights)
    ignored, *_ = improve(NETWORK, parameters, damping, inputs, spoilt, weights)
    np.testing.assert_array_equal(kept, ignored)
