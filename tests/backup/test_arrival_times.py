"""The isotonic solver against cvxpy, and what the order says where there are no samples."""

from __future__ import annotations

import numpy as np
import pytest

from paceline.backup import arrival_times
from paceline.backup.protocol import Timings


def reference(means, weights):
    cp = pytest.importorskip("cvxpy")
    x = cp.Variable(means.shape)  # first axis k, second h
    order = [x[1:, :] >= x[:-1, :], x[:, 1:] <= x[:, :-1], cp.diag(x)[1:] >= cp.diag(x)[:-1]]
    problem = cp.Problem(cp.Minimize(cp.sum(cp.multiply(weights, cp.square(x - means)))), order)
    problem.solve(solver=cp.CLARABEL, tol_gap_abs=1e-11, tol_gap_rel=1e-11, tol_feas=1e-11)
    return x.value, problem.value


def drawn(n, density, seed):
    rng = np.random.default_rng(seed)
    k, h = np.mgrid[1 : n + 1, 1 : n + 1]
    means = np.log(n / (n - k + 0.5)) + 0.5 * (n - h) / n + rng.normal(0, 0.5, (n, n))
    return means, rng.integers(1, 5, (n, n)) * (rng.random((n, n)) < density) * 1.0


@pytest.mark.parametrize("n", [2, 3, 6, 11])
@pytest.mark.parametrize("density", [0.1, 0.5, 1.0])
def test_the_optimum_is_that_of_cvxpy(n, density):
    """DBW, eq. (17)."""
    for seed in range(3):
        means, weights = drawn(n, density, seed)
        weights[0, 0] = 1.0
        found = arrival_times.fit(means, weights)
        values, objective = reference(means, weights)
        known = weights > 0
        assert np.sum(weights[known] * (found - means)[known] ** 2) == pytest.approx(objective, abs=1e-6)
        assert np.abs(found - values)[known].max() < 1e-5  # the reference is no more exact than that
        low = arrival_times.lower_bounds(found, known)
        assert np.diff(low, axis=0).min() >= -1e-12
        assert np.diff(low, axis=1).max() <= 1e-12
        assert np.diff(np.diagonal(low)).min() >= -1e-12


def timings(before, seconds):
    n = len(seconds)
    place = np.arange(1, n + 1)
    return Timings(np.full(n, before), place, np.array(seconds, float), place - 1, np.array(seconds, float))


def test_unsampled_counts_take_the_least_that_the_order_allows():
    state = arrival_times.start(3)
    assert arrival_times.constrained(state).tolist() == [0, 0, 0]
    state = arrival_times.update(state, timings(3, [1.0, 2.0, 6.0]))
    seconds = arrival_times.constrained(state)
    assert seconds.tolist() == [1.0, 2.0, 6.0]
    assert np.isnan(arrival_times.naive(state)[:2]).all()
    # After waiting for 2 the first took 2 s, so it takes no less when one always waits for 1.
    state = arrival_times.update(state, timings(2, [2.0, 3.0]))
    assert arrival_times.constrained(state).tolist() == [2.0, 3.0, 6.0]


def test_samples_count_at_their_place_and_quorum_and_only_within_the_workers():
    before, place = np.array([1, 3, 3, 0, 4, 2, 2]), np.array([1, 3, 3, 1, 1, 0, 4])
    times = Timings(before, place, np.array([1.0, 2.0, 4.0, 8.0, 8.0, 8.0, 8.0]), place, np.zeros(7))
    state = arrival_times.update(arrival_times.start(3), times)
    np.testing.assert_array_equal(state.total, [[1, 0, 0], [0, 0, 0], [0, 0, 6]])
    np.testing.assert_array_equal(state.samples, [[1, 0, 0], [0, 0, 0], [0, 0, 2]])
    np.testing.assert_array_equal(arrival_times.naive(state), [1, np.nan, 3])
    half = arrival_times.update(state, times, memory=0.5)
    np.testing.assert_array_equal(np.diagonal(half.samples), [1.5, 0, 3])
    assert arrival_times.naive(half)[2] == 3


def test_forgetting_follows_a_change():
    state = arrival_times.start(2)
    for _ in range(50):
        state = arrival_times.update(state, timings(2, [1.0, 1.0]), memory=0.8)
    for _ in range(10):
        state = arrival_times.update(state, timings(2, [1.0, 5.0]), memory=0.8)
    assert arrival_times.constrained(state)[1] == pytest.approx(5.0, abs=0.5)
