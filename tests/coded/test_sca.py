import itertools

import numpy as np
import pytest

from paceline import PacelineError
from paceline.coded import plan, random_problem
from paceline.papers.coded import successive
from support.skips import skip_without

skip_without("cvxpy")


@pytest.mark.parametrize("seed", range(2))
def test_sca_converges_to_the_linear_programme(seed):
    """Sun et al., eq. (11), Alg. 3, lines 1 to 6."""
    problem = random_problem(2, 10, 1e4, np.random.default_rng(seed))
    best = plan(problem, "probabilistic").t_star.max()
    trace = [z.t for z in itertools.islice(successive(problem.delay, problem.rows), 250)]
    assert trace[-1] == pytest.approx(best, rel=2e-3)
    assert min(trace) >= best * (1 - 1e-6)  # a feasible point cannot be better
    assert (np.diff(trace) < 1e-6 * trace[0]).all()


def test_every_iterate_is_a_feasible_point_of_p3():
    """Sun et al., eq. (10), Lemma 2."""
    problem = random_problem(3, 9, 1e4, np.random.default_rng(0))
    for z in itertools.islice(successive(problem.delay, problem.rows), 30):
        expected = (z.k * z.loads * problem.delay.cdf(z.t / np.maximum(z.loads, 1e-9))).sum(1)
        assert (expected >= problem.rows * (1 - 1e-6)).all()
        assert (z.k.sum(0) <= 1 + 1e-9).all()


def test_sca_stops_where_t_changes_by_less_than_one_millionth():
    """Sun et al., Alg. 3, lines 1 to 6."""
    problem = random_problem(2, 10, 1e4, np.random.default_rng(0))
    trace = np.array([z.t for z in successive(problem.delay, problem.rows)])
    change = np.abs(1 - trace[1:] / trace[:-1])
    assert change[-1] < 1e-6
    assert (change[:-1] >= 1e-6).all()
    further = itertools.islice(successive(problem.delay, problem.rows, stop=0), len(trace) + 5)
    np.testing.assert_array_equal([z.t for z in further][: len(trace)], trace)


def test_a_ratio_out_of_range_is_refused():
    problem = random_problem(2, 6, 1e4, np.random.default_rng(0))
    with pytest.raises(PacelineError, match="decreasing ratio"):
        next(successive(problem.delay, problem.rows, 2.0))
