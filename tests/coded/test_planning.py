import dataclasses
import itertools
import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import brentq, linprog, minimize

from paceline import PacelineError
from paceline.coded import (
    Problem,
    Weibull,
    layout,
    plan,
    random_problem,
    read_plan,
    simulate,
    stretched,
)
from paceline.coded.coded_plan import ASSIGNMENTS, completion
from paceline.coded.rearranged import _fewest_moves
from support.problems import problem_of


def expected_rows(made, m, t):
    """E[X_m(t)] of eq. (4), straight from the distribution."""
    mine = np.flatnonzero(made.loads[m] > 0)
    load, wait = made.loads[m, mine], 0.0 if made.problem.latency is None else made.problem.latency[m, mine]
    chance = made.problem.delay.take((m, mine)).cdf(np.maximum(t - wait, 0) / load)
    return (made.probability[m, mine] * load * chance).sum()


def test_theorem_1_equals_a_numerical_minimum_over_loads():
    """Sun et al., eq. (7), Lemma 1."""
    problem = problem_of([[2.0, 1.0, 0.5]], [[0.3, 0.5, 1.0]])
    made = plan(problem, "uniform")

    def shortage(x):
        loads, t = np.exp(x[:3]), np.exp(x[3])
        return (loads * problem.delay.cdf(t / loads[None])[0]).sum() - 1000

    start = np.log([400.0, 300.0, 300.0, 1500.0])
    found = minimize(
        lambda x: x[3], start, constraints={"type": "ineq", "fun": shortage}, method="SLSQP",
        options={"maxiter": 500},
    )  # fmt: skip
    assert np.exp(found.x[3]) == pytest.approx(made.t_star[0], rel=1e-5)
    np.testing.assert_allclose(np.exp(found.x[:3]), made.loads[0], rtol=1e-2)


@pytest.mark.parametrize("assign", ASSIGNMENTS)
@pytest.mark.parametrize("late", [False, True])
def test_exactly_the_rows_needed_are_expected_by_t_star(assign, late):
    """Sun et al., eq. (6)."""
    problem = random_problem(3, 12, 5000, np.random.default_rng(0))
    if late:
        problem = dataclasses.replace(problem, latency=np.random.default_rng(1).uniform(0, 900, (3, 12)))
    made = plan(problem, assign)
    for m in range(3):
        assert expected_rows(made, m, made.t_star[m]) == pytest.approx(5000, rel=1e-9)
    assert (made.rows_assigned >= made.loads - 1e-6).all()
    assert (made.rows_assigned - made.loads < 1).all()
    assert (made.rows_assigned.sum(1) >= 5000).all()


def test_redundancy_of_the_paper_s_setting():
    made = plan(random_problem(2, 20, 1e5, np.random.default_rng(0)), "exact")
    np.testing.assert_allclose(made.redundancy, 3.14619 / 2.14619, atol=1e-5)


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 3), st.integers(3, 9), st.integers(1, 500), st.integers(0, 99))
def test_uncoded_rows_sum_to_l_exactly(masters, workers, rows, seed):
    problem = random_problem(masters, workers, rows, np.random.default_rng(seed))
    for assign in ("uniform", "simple"):
        assert (plan(problem, assign, coded=False).rows_assigned.sum(1) == rows).all()


def test_uncoded_uniform_time_is_the_mean_of_the_slowest():
    made = plan(problem_of([[1.0, 1.0, 1.0]], [[0.5, 0.5, 0.5]], rows=300), "uniform", coded=False)
    # 100 rows each: 100 (a + max of three exponentials), whose mean is 1 + 1/2 + 1/3
    assert made.t_star[0] == pytest.approx(100 * (0.5 + 11 / 6), rel=1e-6)


@pytest.mark.parametrize("assign", ["uniform", "exact"])
@pytest.mark.parametrize("rows", [1, 3, 5])
def test_uncoded_time_of_fewer_rows_than_workers_is_that_of_whole_rows(assign, rows):
    made = plan(random_problem(1, 8, rows, np.random.default_rng(0)), assign, coded=False)
    mean = simulate(made, 40_000, np.random.default_rng(1)).mean()
    assert mean.low * 0.99 < made.t_star[0] < mean.high * 1.01


@pytest.mark.parametrize("k", [0.4, 1.0, 4.0])
def test_uncoded_time_of_one_worker_is_its_mean_however_heavy_the_tail(k):
    delay = Weibull(np.array([[2.0]]), np.array([[0.5]]), np.array([[k]]))
    made = plan(Problem(("m",), ("w",), np.array([100.0]), delay), "uniform", coded=False)
    assert made.t_star[0] == pytest.approx(100 * delay.mean()[0, 0], rel=1e-4)


def test_a_worker_with_more_latency_than_the_plan_takes_is_left_out():
    latency = np.array([[0.0, 0.0, 1e9]])
    made = plan(problem_of([[2.0, 1.0, 50.0]], [[0.3, 0.5, 0.01]], latency=latency), "simple")
    assert made.workers_of("m0").tolist() == [0, 1]
    alone = plan(problem_of([[2.0, 1.0]], [[0.3, 0.5]]), "simple")
    assert made.t_star[0] == pytest.approx(alone.t_star[0])


@pytest.mark.parametrize("seed", range(4))
def test_with_latency_the_linear_programme_is_the_smallest_feasible_time(seed):
    problem = random_problem(2, 8, 2000, np.random.default_rng(seed))
    problem = dataclasses.replace(problem, latency=np.random.default_rng(seed).uniform(0, 400, (2, 8)))
    t = plan(problem, "probabilistic").t_star.max()
    rate = problem.delay.peak()[1]

    def feasible(t):  # some k with sum_n k rate (t - d)+ >= L for both masters
        brings = rate * np.maximum(t - problem.latency, 0)
        matrix = np.vstack([np.kron(np.eye(2), np.ones(8)) * -brings.ravel(), np.tile(np.eye(8), 2)])
        return linprog(np.zeros(16), matrix, np.r_[-problem.rows, np.ones(8)]).status == 0

    assert feasible(t * 1.0001)
    assert not feasible(t * 0.9999)


def test_a_general_distribution_is_planned_through_the_same_call():
    shape = (2, 6)
    delay = Weibull(np.full(shape, 2.0), np.full(shape, 0.5), np.full(shape, 0.7))
    made = plan(Problem(("x", "y"), tuple("abcdef"), np.array([900.0, 900.0]), delay), "exact")
    assert expected_rows(made, 0, made.t_star[0]) == pytest.approx(900)


def test_json_contains_the_plan():
    made = plan(random_problem(2, 5, 100, np.random.default_rng(0)), "probabilistic")
    read = json.loads(made.dumps())
    assert read["t_star"] == made.t_star.max()
    first = read["masters"][0]
    assert first["master"] == "master0"
    assert first["rows"] == 100
    assert first["redundancy"] == pytest.approx(made.redundancy[0])
    assert [w["worker"] for w in first["workers"]] == [f"worker{n}" for n in made.workers_of(0)]
    for worker in first["workers"]:
        assert worker["load"] <= worker["rows_assigned"] < worker["load"] + 1
        assert 0 < worker["probability"] <= 1


def test_bad_requests_are_refused():
    problem = random_problem(2, 3, 10, np.random.default_rng(0))
    with pytest.raises(PacelineError, match="expected one of uniform"):
        plan(problem, "best")
    with pytest.raises(PacelineError, match="uncoded"):
        plan(problem, "probabilistic", coded=False)
    with pytest.raises(PacelineError, match="not in the plan"):
        plan(problem).workers_of("nobody")


def test_a_worker_that_serves_minus_nothing_brings_nothing():
    """A solver's 0 may be -0.0."""
    problem = random_problem(2, 4, 1000, np.random.default_rng(0))
    rate = problem.delay.peak()[1]
    k = np.array([[1.0, 1.0, 0.0, 0.0], [0.0, 0.0, 1.0, 1.0]])
    assert completion(problem, np.where(k == 0, -0.0, k), rate) == pytest.approx(
        problem.rows / (k * rate).sum(1)
    )


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"coded": "x"}, "coded='x': expected True or False"),
        ({"problem": "x"}, "problem='x': expected a paceline.coded.Problem"),
        ({"probability": np.ones(3)}, "probability=.*: expected an array of shape 2 x 4"),
        ({"loads": "x"}, "loads='x': expected an array of shape 2 x 4"),
    ],
)
def test_impossible_coded_plan_raises(given, words):
    made = plan(random_problem(2, 4, 100, np.random.default_rng(0)))
    with pytest.raises(PacelineError, match=words):
        dataclasses.replace(made, **given)
    with pytest.raises(PacelineError, match="coded='no': expected True or False"):
        plan(made.problem, coded="no")


@pytest.mark.parametrize("ua", [0.001, 0.01, 0.3])
def test_capped_loads_equal_a_numerical_minimum_over_loads_of_at_most_l(ua):
    """Sun et al., Theorem 1."""
    u = np.array([[1.0, 2.0, 0.7]])
    made = plan(problem_of(u, ua / u), "uniform")

    grid = np.linspace(1e-3, 1000, 40_001)[:, None]  # loads of each worker

    def shortage(t):
        return (grid * made.problem.delay.cdf(t / grid)).max(0).sum() - 1000

    assert made.t_star[0] == pytest.approx(brentq(shortage, 1.0, 1e5), rel=1e-5)
    assert made.loads.max() <= 1000 * (1 + 1e-12)
    assert expected_rows(made, 0, made.t_star[0]) == pytest.approx(1000, rel=1e-9)


def random_shifts(masters, workers, ua, seed, late=False):
    rng = np.random.default_rng(seed)
    u = rng.uniform(1, 5, (masters, workers))
    return problem_of(u, ua / u, latency=rng.uniform(0, 60, u.shape) if late else None)


def portions_of_loads_up_to_l(problem, t):
    """Of each pair, the largest portion of L rows that it is expected to bring by t, by a grid of loads."""
    load = problem.rows[0] * np.geomspace(1e-3, 1, 4001)[:, None, None]
    left = np.maximum(t - problem.wait, 0.0)
    return (load * problem.delay.cdf(left / load)).max(0) / problem.rows[0]


@pytest.mark.parametrize(("masters", "workers", "seed"), [(2, 4, 4), (2, 5, 0), (2, 5, 5), (3, 6, 2)])
def test_exact_plan_with_capped_loads_is_the_best_of_all_assignments(masters, workers, seed):
    """Sun et al., eq. (6), eq. (8)."""
    problem = random_shifts(masters, workers, 0.01, seed)

    def lacking(t):
        portions = portions_of_loads_up_to_l(problem, t)
        owners = itertools.product(range(masters), repeat=workers)
        served = (portions * (np.array(each) == np.arange(masters)[:, None]) for each in owners)
        return 1 - max(each.sum(1).min() for each in served)

    best = brentq(lacking, 10, 10_000, rtol=1e-6)
    made = plan(problem, "exact")
    assert made.t_star.max() == pytest.approx(best, rel=1e-4)
    by_theorem = plan(problem, "exact", rule="printed").probability
    assert (made.probability != by_theorem).any()


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_probabilistic_plan_with_capped_loads_is_the_linear_programme_s(seed, late):
    """Sun et al., eq. (6)."""
    problem = random_shifts(2, 6, 0.01, seed, late)

    def level(t):
        columns = -portions_of_loads_up_to_l(problem, t).ravel()
        sums = np.hstack([np.kron(np.eye(2), np.ones(6)) * columns, np.ones((2, 1))])
        once = np.hstack([np.tile(np.eye(6), 2), np.zeros((6, 1))])
        found = linprog(np.r_[np.zeros(12), -1.0], np.vstack([sums, once]), np.r_[np.zeros(2), np.ones(6)])
        return -found.fun

    least = brentq(lambda t: level(t) - 1, 30, 10_000, rtol=1e-6)
    assert plan(problem, "probabilistic").t_star.max() == pytest.approx(least, rel=1e-4)


def test_printed_loads_exceed_l_and_take_longer_than_capped_ones():
    problem = problem_of(np.ones((1, 3)), np.full((1, 3), 0.01))
    printed, made = plan(problem, rule="printed"), plan(problem)
    assert printed.loads.max() > 2 * 1000
    assert printed.copies[0] > 7
    assert made.copies[0] == 3
    times = [simulate(each, 4000, np.random.default_rng(0)).mean().value for each in (printed, made)]
    assert times[1] < 0.5 * times[0]


@pytest.mark.parametrize("assign", ["exact", "probabilistic"])
@pytest.mark.parametrize("late", [False, True])
def test_plan_read_back_equals_the_plan_written(tmp_path, assign, late):
    problem = random_problem(3, 7, 500, np.random.default_rng(2))
    if late:
        problem = dataclasses.replace(problem, latency=np.full((3, 7), 2.5))
    made = plan(problem, assign)
    (tmp_path / "plan.json").write_text(made.dumps())
    read = read_plan(tmp_path / "plan.json")
    assert read.dumps() == made.dumps()
    np.testing.assert_array_equal(read.loads, made.loads)
    (tmp_path / "plan.json").write_text("[1]")
    with pytest.raises(PacelineError, match="is not a plan"):
        read_plan(tmp_path / "plan.json")


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 3), st.integers(1, 2), st.integers(0, 99))
def test_plan_that_survives_has_enough_rows_and_blocks_without_any_workers(masters, survive, seed):
    rng = np.random.default_rng(seed)
    u = rng.uniform(1, 30, (masters, 4 * masters))
    made = stretched(plan(problem_of(u, rows=400.0), "uniform"), survive=survive)
    assert (made.may_lose >= survive).all()
    for m in range(masters):
        for lost in itertools.combinations(made.workers_of(m), survive):
            assert np.delete(made.rows_assigned[m], lost).sum() >= 400
            assert layout(made, m).enough(n for n in made.workers_of(m) if n not in lost)
    with pytest.raises(PacelineError, match="add workers"):
        stretched(made, survive=4)


def test_rows_of_an_uncoded_plan_go_to_the_largest_remainders():
    made = plan(random_problem(1, 3, 10, np.random.default_rng(0)), "uniform", coded=False)
    for loads, whole in (
        ([3.2, 3.7, 3.1], [3, 4, 3]),
        ([2.6, 3.7, 3.7], [2, 4, 4]),
        ([5.0, 5.0, 0.0], [5, 5, 0]),
    ):
        rounded = dataclasses.replace(made, loads=np.array([loads])).rows_assigned
        assert rounded.tolist() == [whole]
    coded = dataclasses.replace(made, coded=True, loads=np.array([[3.2, 4.0, 1e6 + 1e-4]]))
    assert coded.rows_assigned.tolist() == [[4, 4, 10**6]]  # what is a billionth beyond is rounding


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 999))
def test_fewest_workers_move_so_that_all_masters_have_their_rows(seed):
    """By all assignments of four workers to two masters, or to none."""
    rng = np.random.default_rng(seed)
    serving, brings = rng.integers(-1, 2, 4), rng.uniform(0.2, 1.2, (2, 4))
    found = _fewest_moves(serving, brings)
    every = [np.array(each) for each in itertools.product((-1, 0, 1), repeat=4)]
    keeps = [
        int((each[each >= 0] == serving[each >= 0]).sum())
        for each in every
        if all(brings[m][each == m].sum() >= 1 for m in range(2))
    ]
    if not keeps:
        assert found is None
        return
    assert ((found * brings).sum(1) >= 1 - 1e-6).all()
    assert (found.sum(0) <= 1).all()
    assert int((found * (serving == np.arange(2)[:, None])).sum()) == max(keeps)
