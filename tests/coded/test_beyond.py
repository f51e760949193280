"""The deadline form, delivery in parts, and masters that come and go."""

import dataclasses
import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import binom

from paceline import PacelineError
from paceline.coded import (
    Problem,
    by_deadline,
    plan,
    random_problem,
    rearrange,
    stretched,
)
from paceline.coded.deadline import _scaled, never_done, success
from paceline.coded.simulate import simulate
from support.problems import problem_of


def of(problem, masters):
    chosen = np.ix_(masters, range(problem.shape[1]))
    names = tuple(problem.masters[m] for m in masters)
    return Problem(names, problem.workers, problem.rows[masters], problem.delay.take(chosen))


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 30), st.floats(0, 1)), min_size=1, max_size=8), st.integers(1, 60))
def test_success_is_the_sum_over_who_arrives(workers, need):
    """Sun et al., eq. (2)."""
    loads, chance = np.array([w[0] for w in workers]), np.array([w[1] for w in workers])
    expected = sum(
        np.prod(np.where(arrived, chance, 1 - chance))
        for arrived in itertools.product([False, True], repeat=len(workers))
        if loads[list(arrived)].sum() >= need
    )
    assert success(loads, chance, need) == pytest.approx(expected, abs=1e-12)
    assert success(loads, chance, need, units=40) <= expected + 1e-12


@pytest.mark.parametrize("seed", range(3))
def test_deadline_raises_the_probability_and_computes_it_exactly(seed):
    made = plan(random_problem(2, 14, 2000, np.random.default_rng(seed)))
    t = 1.4 * made.t_star.max()
    before = simulate(made, 40_000, np.random.default_rng(9)).probability(t)
    changed, chances = by_deadline(made, t)
    done = simulate(changed, 40_000, np.random.default_rng(9))
    for m in range(2):
        at = done.probability(t, m)
        assert at.low - 0.002 < chances[m] < at.high + 0.002
    assert np.prod(chances) > before.high
    assert (changed.probability.sum(0) <= 1).all()


@pytest.mark.parametrize("seed", range(4))
def test_deadline_of_a_few_workers_is_near_the_best_of_a_grid(seed):
    """Sun et al., eq. (2)."""
    made = plan(random_problem(1, 3, 600, np.random.default_rng(seed)))
    t = 1.3 * made.t_star[0]
    found = by_deadline(made, t)[1][0]
    grid = np.arange(0, 601, 24)
    best = 0.0
    for loads in itertools.product(grid, repeat=3):
        loads = np.array(loads)
        if loads.sum() >= 600:
            chance = np.where(loads > 0, made.problem.delay.cdf(t / np.maximum(loads, 1)[None])[0], 0)
            best = max(best, success(loads, chance, 600))
    assert found > best - 0.005


def test_deadline_far_away_and_much_too_soon():
    made = plan(random_problem(1, 6, 600, np.random.default_rng(0)))
    assert by_deadline(made, 100 * made.t_star[0])[1][0] > 1 - 1e-9
    for part in (1e-6, 0.1):  # also where some workers may deliver, but too few rows
        with pytest.raises(PacelineError, match=r"no loads were found that .* give a later deadline"):
            by_deadline(made, part * made.t_star[0])


def test_bad_deadlines_are_refused():
    made = plan(random_problem(2, 5, 100, np.random.default_rng(0)))
    for t in (0, -1, np.inf, np.nan):
        with pytest.raises(PacelineError, match="positive number"):
            by_deadline(made, t)
    shared = dataclasses.replace(made, probability=np.full((2, 5), 0.5))
    with pytest.raises(PacelineError, match="dedicated"):
        by_deadline(shared, 100)
    with pytest.raises(PacelineError, match="coded plan"):
        by_deadline(plan(made.problem, coded=False), 100)


def test_messages_that_use_partial_work_halve_the_mean():
    made = plan(random_problem(4, 50, 1e5, np.random.default_rng(1)))
    uncoded = plan(made.problem, "iterated", coded=False)

    def mean(of, messages=1):
        return simulate(of, 4000, np.random.default_rng(0), messages).mean().value

    assert mean(made, 8) < 0.65 * mean(made) < 0.65 * mean(uncoded)


def test_stretching_sets_the_redundancy():
    made = stretched(plan(random_problem(2, 10, 1000, np.random.default_rng(2))), 2.5)
    np.testing.assert_allclose(made.redundancy, 2.5)
    with pytest.raises(PacelineError, match="at least 1"):
        stretched(made, 0.9)


def brute_force(old, problem, limit):
    """Fewest workers whose owner changes, over all assignments with t* within the limit."""
    rate = problem.delay.peak()[1]
    serving = old.probability.argmax(0)
    fewest = None
    for owner in itertools.product(range(problem.shape[0]), repeat=problem.shape[1]):
        owner = np.array(owner)
        speed = [rate[m, owner == m].sum() for m in range(problem.shape[0])]
        if min(speed) > 0 and (problem.rows / speed).max() <= limit * (1 + 1e-9):
            moved = int((owner != serving).sum())
            fewest = moved if fewest is None else min(fewest, moved)
    return fewest


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("within", [0.0, 0.1, 0.5])
def test_an_arriving_master_moves_as_few_workers_as_brute_force_finds(seed, within):
    problem = random_problem(3, 8, 1000, np.random.default_rng(seed))
    old = plan(of(problem, [0, 1]), "exact")
    found = rearrange(old, problem, within)
    best = plan(problem, "exact").t_star.max()
    assert found.plan.t_star.max() <= best * (1 + within) * (1 + 1e-6)
    assert len(found.moved) == brute_force(old, problem, best * (1 + within))


@pytest.mark.parametrize("seed", range(6))
def test_rearranged_plan_with_capped_loads_keeps_the_limit(seed):
    u = np.random.default_rng(seed).uniform(1, 5, (3, 8))
    problem = problem_of(u, 0.01 / u)
    old = plan(of(problem, [0, 1]), "exact")
    best = plan(problem, "exact").t_star.max()
    assert rearrange(old, problem, 0.05).plan.t_star.max() <= best * 1.05 * (1 + 1e-6)


def test_a_leaving_master_s_workers_are_not_counted_as_moved():
    problem = random_problem(3, 9, 1000, np.random.default_rng(7))
    old = plan(problem, "exact")
    found = rearrange(old, of(problem, [0, 2]), within=10.0)
    assert found.moved == ()
    for m, was in ((0, 0), (1, 2)):
        assert set(old.workers_of(was)) <= set(found.plan.workers_of(m))


def test_workers_that_come_and_go_are_known_by_name():
    problem = random_problem(2, 8, 1000, np.random.default_rng(8))
    old = plan(problem, "exact")
    other = random_problem(2, 8, 1000, np.random.default_rng(9))
    other = dataclasses.replace(other, workers=(*problem.workers[:6], "new0", "new1"))
    found = rearrange(old, other, within=0.2)
    assert set(found.moved) <= set(problem.workers[:6])
    with pytest.raises(PacelineError, match="within"):
        rearrange(old, other, within=-1)


def test_plan_whose_workers_are_drawn_may_never_hold_all_rows():
    made = plan(random_problem(2, 2, 10, np.random.default_rng(0)), "uniform")
    loads = np.array([[6.0, 6.0], [10.0, 10.0]])
    drawn = dataclasses.replace(made, probability=np.array([[0.5, 0.25], [0.5, 0.25]]), loads=loads)
    # The first needs both, the second one of them.
    np.testing.assert_allclose(never_done(drawn), [1 - 0.5 * 0.25, 0.5 * 0.75])
    certain = dataclasses.replace(made, probability=np.array([[0.5, 1.0], [1.0, 0.0]]), loads=loads)
    np.testing.assert_array_equal(never_done(certain), [0.5, 0.0])


def test_search_for_a_deadline_starts_also_from_equal_loads_of_which_some_suffice():
    """Of n equal workers with L / j rows each, j must arrive: a binomial tail. (1000 parts have no third.)"""
    n, rows, t = 4, 120, 60.0
    problem = problem_of(np.full((1, n), 2.0), rows=float(rows))
    by_hand = {
        j: binom.sf(j - 1, n, problem.delay.cdf(np.full((1, n), t * j / rows))[0, 0]) for j in range(1, n + 1)
    }
    found = _scaled(problem, 0, list(range(n)), t)
    for j in sorted(by_hand, key=by_hand.get)[2:]:
        same = [chance for chance, loads in found if loads == pytest.approx(np.full(n, rows / j), rel=1e-8)]
        assert max(same) == pytest.approx(by_hand[j], rel=1e-6)
    best = by_deadline(plan(problem), t)[1][0]
    assert best >= max(by_hand.values()) - 1e-9
