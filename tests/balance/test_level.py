"""The default: at the optimum after one look, through noise, and in the round after a change."""

import numpy as np
import pytest

from paceline import Cluster, Plan, Round, policies
from paceline.costs import Linear
from paceline.shares import water_level, whole_samples

from .streams import constant, drifting, moving, play


def test_one_round_is_enough():
    slopes, waits = np.array([1e-3, 2e-3, 4e-3]), np.array([0.02, 0.0, 0.01])
    costs = constant(slopes, waits, 20)
    _, played, _, _ = play("level", costs, 300)
    np.testing.assert_allclose(played[1:], np.tile(water_level(costs[0], 300).loads, (19, 1)), rtol=1e-9)


def test_a_moving_straggler_costs_one_blind_round_each_time():
    ratio, played, _, _ = play("level", moving(200), 512, whole=True)
    assert 1 / ratio >= 0.92
    for change in range(40, 200, 40):
        np.testing.assert_array_equal(np.sort(played[change + 1]), [39, 157, 158, 158])


def test_drifting_speeds_are_followed():
    """Profile A. A forecaster that knew the process itself would come to 1.138: one blind round makes 0.07 of it."""
    ratio, *_ = play("level", drifting(100, realizations=20), 256)
    assert ratio < 1.15


@pytest.mark.parametrize("whole", [False, True])
def test_noise_is_averaged(whole):
    """Measurements scatter by 30 % around constant speeds; chasing the last one costs more than twice as much."""
    rng = np.random.default_rng(1)
    true = constant(rng.choice([1 / 3000, 1 / 1700, 1 / 1000, 1 / 90, 1 / 45], (10, 30)), 0.02, 100)
    noisy = [
        Linear(c.seconds_per_sample * np.exp(0.3 * rng.standard_normal((10, 30))), c.overhead) for c in true
    ]
    ratio, *_ = play("level", true, 256, observed=noisy, whole=whole)
    assert ratio < 1.20
    last, *_ = play("level:forecast=last", true, 256, observed=noisy, whole=whole)
    assert last - 1 > 1.5 * (ratio - 1)


def test_a_spike_of_one_round_costs_one_round_more_and_leaves_nothing():
    costs = constant([1e-3] * 4, 0.0, 30)
    spiked = list(costs)
    spiked[10] = Linear(np.array([1e-3, 1e-2, 1e-3, 1e-3]), np.zeros(4))
    _, played, _, _ = play("level", spiked, 400)
    np.testing.assert_allclose(played[:11], np.full((11, 4), 100.0), rtol=1e-6)
    assert 400 / 3.2 < played[11, 0] < 400 / 3
    np.testing.assert_allclose(played[12:], np.full((18, 4), 100.0), rtol=1e-3)


def test_a_worker_too_slow_for_a_sample_is_tried_again():
    """Ten times slower for a while, and few samples each: it gets none, yet comes back when it can."""
    slow = [Linear(np.array([1.0, 1.0, 1.0, 30.0]), np.zeros(4))] * 20
    costs = slow + constant([1.0] * 4, 0.0, 600)
    _, played, _, _ = play("level", costs, 16, whole=True)
    assert np.all(played[2:20, 3] == 0)
    np.testing.assert_array_equal(played[-1], [4, 4, 4, 4])


def test_a_worker_with_its_lowest_load_is_tried_again():
    """Its seconds were once all taken for its pace; with one sample in each round, nothing tells that most of them
    are its overhead."""
    policy = policies.create("level", Cluster(4, 64, least=np.ones(4)))
    _, state = policy.init()
    loads, tried = np.array([21, 21, 21, 1]), []
    for _ in range(400):
        seconds = np.where(loads < 2, 0.86, 0.85 + 0.15 * loads / 16)
        seconds[3] = 0.86 if loads[3] == 1 else 2.0 * loads[3]
        plan, state = policy.step(state, Round(loads / 64, seconds, 64, np.zeros(4)))
        loads = whole_samples(plan, 64, np.ones(4))
        tried.append(loads[3] > 1)
    assert 2 <= sum(tried) <= 400 / 20  # where more really takes far longer, it is tried seldom


def test_a_worker_that_was_away_for_long_comes_back_to_its_share():
    slopes = np.array([1e-3, 2e-3, 4e-3])
    policy = policies.create("level", Cluster(3, 280))
    plan, state = policy.init()
    for t in range(200):
        seconds = slopes * plan.shares * 280
        if 50 <= t < 198:
            seconds[1] = np.nan
        plan, state = policy.step(state, Round(plan.shares, seconds, 280))
    np.testing.assert_allclose(plan.shares * 280, [160, 80, 40], rtol=0.02)


def test_a_worker_never_measured_counts_as_the_average_one():
    policy = policies.create("level", Cluster(3, 90))
    _, state = policy.init()
    seconds = np.array([0.030, 0.010, 0.0])
    plan, _ = policy.step(state, Round(np.array([0.5, 0.5, 0.0]), seconds, 90))
    np.testing.assert_allclose(1 / plan.shares / (1 / plan.shares).sum(), np.array([3, 1, 2]) / 6, rtol=0.01)


def test_seconds_of_a_thousandth_of_an_equal_load_say_nothing_of_the_pace():
    policy = policies.create("level", Cluster(2, 2000))
    shares = np.array([1.0, 1999.0]) / 2000
    plan, _ = policy.step(policy.init()[1], Round(shares, np.array([5.0, 2.0]), 2000))
    np.testing.assert_allclose(plan.shares, 0.5, rtol=0.01)


def test_whole_samples_go_by_the_expected_seconds():
    costs = constant([1e-3, 45e-3], 0.0, 3)
    _, _, plan, _ = play("level", costs, 40)
    by_cost, by_share = whole_samples(plan, 40), whole_samples(Plan(plan.shares), 40)
    assert by_cost.tolist() == [40, 0]  # one sample of the slow worker would outlast everything
    assert costs[0].seconds(by_cost).max() <= costs[0].seconds(by_share).max()


def test_any_forecast_can_take_the_place_of_tracking():
    for name in ("last", "ema:gain=0.5;of=seconds"):
        _, played, _, _ = play(f"level:forecast={name}", constant([1e-3, 3e-3], 0.0, 3), 256)
        np.testing.assert_allclose(played[-1], [192, 64])


def test_level_of_every_realization_is_unknown_before_the_first_round():
    for realizations in ((), (3,), (2, 3)):
        _, state = policies.create("level", Cluster(4, 64, realizations=realizations)).init()
        assert state.level.shape == realizations
        assert np.isnan(state.level).all()
        assert state.overhead.shape == (*realizations, 4)
