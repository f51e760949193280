import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from scipy.linalg import block_diag
from scipy.optimize import linprog

from paceline import PacelineError
from paceline.coded import random_problem
from paceline.coded.assign import _promising, _rounded, exact, iterated, probabilistic, simple, uniform


def level(values, k):
    return (values * k).sum(1).min()


def brute_force(values):
    masters, workers = values.shape
    owners = np.array(list(itertools.product(range(masters), repeat=workers)))
    sums = [(values * (owners[:, None, :] == m)[:, :, :]).sum(2)[:, m] for m in range(masters)]
    return np.min(sums, axis=0).max()


def draw(masters, workers, seed, speeds=None):
    problem = random_problem(masters, workers, 1e5, np.random.default_rng(seed), speeds)
    return problem.delay.peak()[1] / 1e5


@st.composite
def cases(draw_):
    masters = draw_(st.integers(1, 4))
    workers = draw_(st.integers(masters, 12))
    return draw_(hnp.arrays(float, (masters, workers), elements=st.floats(0.01, 10)))


@settings(max_examples=60, deadline=None)
@given(cases())
def test_every_worker_serves_one_master_and_no_level_exceeds_the_linear_programme(values):
    bound = level(values, probabilistic(values))
    for choose in (uniform, simple, iterated, exact):
        k = choose(values)
        assert set(np.unique(k)) <= {0.0, 1.0}
        assert (k.sum(0) <= 1).all()
        assert level(values, k) <= bound * (1 + 1e-7)
    assert (probabilistic(values).sum(0) <= 1 + 1e-12).all()


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize(("masters", "workers"), [(2, 10), (3, 8)])
@pytest.mark.parametrize("speeds", [None, (1.0, 2.0, 3.0, 4.0, 5.0), (1.0, 5.0)])
def test_exact_is_what_brute_force_finds(masters, workers, speeds, seed):
    """Sun et al., eq. (9), Proposition 1."""
    values = draw(masters, workers, seed, speeds)
    assert level(values, exact(values)) >= brute_force(values) * (1 - 1e-4)


def test_the_integer_programme_alone_finds_the_optimum(monkeypatch):
    """Sun et al., eq. (9), Proposition 1, benchmark 3: without the greedy start that mostly finds it first, in plain
    and in whole units."""
    monkeypatch.setattr("paceline.coded.assign.iterated", lambda values: uniform(values))
    monkeypatch.setattr("paceline.coded.assign._rounded", lambda values, relaxed: uniform(values))
    for speeds in (None, (1.0, 2.0, 3.0, 4.0, 5.0)):
        for seed in range(4):
            values = draw(3, 8, seed, speeds)
            assert level(values, exact(values)) >= brute_force(values) * (1 - 1e-4)


@pytest.mark.parametrize("seed", range(2, 4))
def test_whole_speeds_are_solved_at_once(seed):
    """Levels in whole units: the relaxation's bound lies between two, which alone would take HiGHS
    minutes.
    """
    values = draw(4, 50, seed, (1.0, 2.0, 3.0, 4.0, 5.0))
    unit = values.min()
    found, bound = (level(values, f(values)) / unit for f in (lambda v: exact(v, seconds=10), probabilistic))
    assert round(found) == np.floor(bound + 1e-6)


def test_linear_programme_equals_an_independent_solver_s():
    cvxpy = pytest.importorskip("cvxpy")
    values = draw(4, 20, 0) * 1e3
    k = cvxpy.Variable(values.shape, nonneg=True)
    problem = cvxpy.Problem(
        cvxpy.Maximize(cvxpy.min(cvxpy.sum(cvxpy.multiply(values, k), axis=1))), [cvxpy.sum(k, axis=0) <= 1]
    )
    problem.solve(solver=cvxpy.CLARABEL)
    assert level(values, probabilistic(values)) == pytest.approx(problem.value, rel=1e-6)


@pytest.mark.parametrize("seed", range(3))
def test_linear_programme_divides_at_most_one_worker_less_than_there_are_masters(seed):
    k = probabilistic(draw(4, 50, seed))
    assert (((k > 1e-9) & (k < 1 - 1e-9)).any(0)).sum() <= 3


@pytest.mark.parametrize("ratio", [1.0, 1e-3, 1e8, 1e12])
def test_linear_programme_of_very_different_rows_equals_a_division_by_hand(ratio):
    """Two masters: workers in the order of v0 / v1, the first ones to master 0, one of them divided."""
    values = draw(2, 9, 5) * np.array([[ratio], [1.0]])
    order = np.argsort(values[1] / values[0])
    first, second = values[:, order]
    before, after = np.cumsum(first) - first, second.sum() - np.cumsum(second)
    n = int(np.argmax(before + first >= after))
    part = (after[n] + second[n] - before[n]) / (first[n] + second[n])  # both masters have the same sum
    assert level(values, probabilistic(values)) == pytest.approx(before[n] + part * first[n], rel=1e-6)


def test_simple_greedy_by_hand():
    # pairs 9 (master 0, worker 2) and 8 (master 1, worker 1) first; then master 1, at 8, takes worker 0
    values = np.array([[5.0, 7.0, 9.0, 1.0], [4.0, 8.0, 6.0, 2.0]])
    np.testing.assert_array_equal(simple(values), [[0, 0, 1, 1], [1, 1, 0, 0]])


def test_uniform_splits_50_workers_13_13_12_12():
    """Sun et al., benchmark 2."""
    assert uniform(np.ones((4, 50))).sum(1).tolist() == [13, 13, 12, 12]


def test_printed_rule_leaves_masters_empty_where_they_tie_and_the_tie_safe_rule_does_not():
    """Sun et al., Alg. 1, lines 7 to 15."""
    # Equal across masters: all workers start at master 0, two masters tie at nothing.
    values = np.ones((3, 9))
    assert level(values, iterated(values, "printed")) == 0
    assert level(values, iterated(values)) == 3


def test_iterated_beats_simple_on_average_and_comes_near_the_optimum():
    levels = []
    for seed in range(8):
        values = draw(4, 50, seed)
        levels.append([level(values, f(values)) for f in (simple, iterated, probabilistic)])
    mean = np.mean(levels, axis=0)
    assert mean[0] < mean[1] < mean[2]
    assert mean[1] > 0.97 * mean[2]


def test_exact_gives_the_best_it_has_when_time_is_up():
    values = draw(4, 50, 1)
    assert level(values, exact(values, seconds=0.01)) >= level(values, iterated(values))


def test_unknown_rule_is_refused():
    with pytest.raises(PacelineError, match="tie-safe"):
        iterated(np.ones((2, 3)), "other")


@pytest.mark.parametrize("equal_rows", [False, True])
def test_iterated_is_never_worse_than_simple_and_near_brute_force_on_small_clusters(equal_rows):
    rng = np.random.default_rng(0)
    over = []
    for _ in range(40):
        values = rng.uniform(0.3, 2, (3, 7))
        values = np.tile(values[0], (3, 1)) if equal_rows else values
        found = level(values, iterated(values))
        assert found >= level(values, simple(values)) * (1 - 1e-12)
        over.append(brute_force(values) / found)
    assert np.mean(over) < 1.01


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 999))
def test_rounding_climbs_to_the_best_assignment_from_any_start(seed):
    """Two masters and six workers, from all workers at one master, against all assignments."""
    values = np.random.default_rng(seed).uniform(1, 3, (2, 6))
    best = brute_force(values)

    found = _rounded(values, np.array([np.ones(6), np.zeros(6)]))
    assert found.sum(0).tolist() == [1.0] * 6
    assert min((found * values).sum(1)) >= 0.9 * best  # a local search, which may end beside the best


@settings(max_examples=6, deadline=None)
@given(st.integers(0, 999))
def test_most_pairs_that_the_linear_programme_uses_are_promising(seed):
    rng = np.random.default_rng(seed)
    masters, workers = 3, 100
    values = rng.uniform(1, 5, (masters, workers)) * rng.uniform(0.2, 5, (masters, 1))
    rows = np.hstack([-block_diag(*values), np.ones((masters, 1))])
    once = np.hstack([np.tile(np.eye(workers), masters), np.zeros((workers, 1))])
    answer = linprog(
        np.r_[np.zeros(values.size), -1],
        np.vstack([rows, once]),
        np.r_[np.zeros(masters), np.ones(workers)],
    )
    used = answer.x[:-1].reshape(values.shape) > 1e-6
    promising = _promising(values)
    assert promising[used].mean() > 0.9
    assert promising.mean() < 0.5  # a third, and some ties
