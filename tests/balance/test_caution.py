"""Margins for uncertain workers, against the stochastic programme that they stand for."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import sparse
from scipy.optimize import linprog

from paceline import Cluster, Round, policies
from paceline.balance import level
from paceline.costs import Linear
from paceline.forecast import overheads
from paceline.shares import water_level
from support.guarantees import guarantee

NEARLY_EQUAL = guarantee(
    "Equal workers under `level` take less than 1.02 times as long as with equal shares, with noise, spikes "
    "and up to 85 % overhead."
)

BATCH = 256


def futures(rng, samples, pace, overhead, noise, jitter):
    shape = (samples, len(pace))
    return (
        pace * np.exp(noise * rng.standard_normal(shape)),
        overhead + jitter * rng.standard_normal(shape),
    )


def best_on_average(paces, overheads):
    """min over loads of the mean over the futures of the slowest worker's seconds: a linear programme."""
    samples, n = paces.shape
    row = np.arange(samples * n)
    loads = sparse.coo_matrix((paces.ravel(), (row, np.tile(np.arange(n), samples))))
    ends = sparse.coo_matrix((-np.ones(samples * n), (row, np.repeat(np.arange(samples), n))))
    cost = np.r_[np.zeros(n), np.ones(samples) / samples]
    whole = sparse.csr_matrix(np.r_[np.ones(n), np.zeros(samples)][None])
    rows = sparse.hstack([loads, ends]).tocsr()
    found = linprog(cost, A_ub=rows, b_ub=-overheads.ravel(), A_eq=whole, b_eq=[BATCH], method="highs-ipm")
    return found.x[:n]


@pytest.mark.parametrize("noise", [0.02, 0.3])
def test_nearly_as_good_as_the_stochastic_programme(noise):
    pace = np.repeat([1 / 3000, 1 / 1000, 1 / 45], 5)
    overhead, jitter = np.full(15, 0.02), 0.001
    rng = np.random.default_rng(0)
    exact = best_on_average(*futures(rng, 300, pace, overhead, noise, jitter))
    plain = Linear(pace, overhead)
    share = np.sqrt(2 / np.pi)  # mean absolute over standard deviation
    errors = level.Errors(np.array([share * noise]), np.array([share * jitter]), np.ones(1))
    margins = water_level(level.cautious(plain, errors), BATCH).loads
    paces, overheads = futures(rng, 20_000, pace, overhead, noise, jitter)

    def mean(loads):
        return (overheads + paces * loads).max(-1).mean()

    together = mean(water_level(plain, BATCH).loads)
    assert mean(margins) < mean(exact) * 1.005
    assert mean(margins) < together - 0.75 * (together - mean(exact))


def test_certain_times_need_no_margin():
    plain = Linear(np.array([0.001, 0.004]), np.array([0.1, 0.0]))
    known = level.learn_errors(level.nothing_expected((2,)), plain, plain.seconds_per_sample, plain.overhead)
    for errors in (level.nothing_expected((2,)), known):
        costs = level.cautious(plain, errors)
        assert np.array_equal(costs.seconds_per_sample, plain.seconds_per_sample)
        assert np.array_equal(costs.overhead, plain.overhead)


@given(
    loads=st.lists(st.floats(1, 50), min_size=2, max_size=40).filter(
        lambda loads: max(loads) > 1.01 * min(loads)
    ),
    noise=st.floats(0, 2),
)
def test_margins_do_not_drive_equal_workers_apart_whose_seconds_hardly_depend_on_the_load(loads, noise):
    loads = np.array(loads)
    pace = loads**0.1 / loads  # twice the load takes 7 % longer
    errors = level.Errors(np.array([noise]), np.zeros(1), np.ones(1))
    planned = water_level(level.cautious(Linear(pace, np.zeros(len(loads))), errors), BATCH).loads
    assert planned.max() / planned.min() < loads.max() / loads.min()


@NEARLY_EQUAL
@given(
    paces=st.lists(st.floats(1e-6, 1e3), min_size=2, max_size=30),
    noise=st.floats(0, 3),
)
def test_margins_grow_with_paces_and_by_a_small_part_of_their_differences(paces, noise):
    pace = np.sort(np.array(paces))
    errors = level.Errors(np.array([noise]), np.zeros(1), np.ones(1))
    planned = level.cautious(Linear(pace, np.zeros(len(pace))), errors)
    apart = np.diff(np.log(pace))
    grown = np.diff(np.log(planned.seconds_per_sample)) - apart
    assert np.all(grown >= -1e-9)
    assert np.all(grown <= level.GROWTH * apart + 1e-9)
    assert planned.seconds_per_sample[0] == pace[0]


@NEARLY_EQUAL
@pytest.mark.parametrize("flat", [0.5, 0.7, 0.85])
def test_equal_workers_stay_nearly_equal_through_spikes_and_overheads(flat):
    """Seconds over those of equal shares, from the same draws."""
    runs, n, samples, rounds = 48, 4, 16, 200
    rng = np.random.default_rng(2)
    policy = policies.create("level", Cluster(n, n * samples, realizations=(runs,)))
    plan, state = policy.init()
    fit, took, equal = overheads.start((runs, n)), 0.0, 0.0
    for t in range(rounds):
        noise = np.exp(0.1 * rng.standard_normal((runs, n)))
        noise *= np.where(rng.random((runs, n)) < 0.1, rng.uniform(1.5, 4, (runs, n)), 1)
        loads = plan.shares * n * samples
        seconds = (flat + (1 - flat) * loads / samples) * noise
        fit = overheads.update(fit, loads, seconds)
        plan, state = policy.step(state, Round(plan.shares, seconds, n * samples, overheads.certain(fit)))
        if t >= rounds // 3:
            took, equal = took + seconds.max(-1).mean(), equal + noise.max(-1).mean()
    assert took / equal < 1.02


def test_scatter_is_learned_and_a_change_of_speed_is_not_scatter():
    rng = np.random.default_rng(0)
    plain = Linear(np.full(20, 0.002), np.full(20, 0.1))
    errors = level.nothing_expected((20,))
    for t in range(200):
        pace = 0.002 * np.exp(0.1 * rng.standard_normal(20)) * (3.0 if t % 50 == 25 else 1.0)
        errors = level.learn_errors(errors, plain, pace, 0.1 + 0.01 * rng.standard_normal(20))
    noise, jitter = level.scatter(errors)
    assert noise == pytest.approx(0.1, rel=0.25)
    assert jitter == pytest.approx(0.01, rel=0.25)


def test_level_is_faster_than_equal_expected_ends():
    pace, overhead = np.repeat([1 / 3000, 1 / 45], 6), np.full(12, 0.02)
    cluster = Cluster(12, BATCH, realizations=(200,))
    policy = policies.create("level", cluster)
    plan, state = policy.init()
    rng = np.random.default_rng(1)
    took = []
    for _ in range(40):
        costs = Linear(
            pace * np.exp(0.2 * rng.standard_normal((200, 12))), np.broadcast_to(overhead, (200, 12))
        )
        seconds = costs.seconds(plan.shares * BATCH)
        took.append(seconds.max(-1).mean())
        plan, state = policy.step(state, Round(plan.shares, seconds, BATCH, costs.overhead))
    same = water_level(Linear(pace, overhead), BATCH).loads
    plain = (overhead + pace * np.exp(0.2 * rng.standard_normal((5000, 12))) * same).max(-1).mean()
    assert np.mean(took[20:]) < 0.98 * plain  # although plain knows the true paces
