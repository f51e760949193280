"""LB-BSP proper, on CPU and GPU clusters."""

import numpy as np
import pytest

from paceline import Cluster, Round, policies
from paceline.costs import Linear
from paceline.errors import PacelineError
from paceline.rounds import Gradients
from paceline.shares import whole_samples
from support.programmes import soonest

from .streams import constant, moving, play

SLOPES = np.array([1e-3, 2e-3, 4e-3, 1e-3])


def test_cpu_shares_follow_speeds_for_any_communication():
    """LB-BSP, section 3.2 (processors): x_i = v_i X / sum v."""
    waits = np.array([0.0, 0.5, 0.1, 0.0])
    _, played, _, _ = play("lbbsp-cpu", constant(SLOPES, waits, 3), 256)
    np.testing.assert_allclose(played[1:], np.tile(256 / SLOPES / (1 / SLOPES).sum(), (2, 1)))


@pytest.mark.parametrize("seed", range(5))
def test_gpu_shares_solve_the_papers_linear_programme(seed):
    """LB-BSP, eqs. (3), (5)."""
    rng = np.random.default_rng(seed)
    n, total = 5, 400
    cost = Linear(rng.uniform(1e-3, 5e-3, n), rng.uniform(0, 0.2, n))
    knee, least, most = 20.0, rng.integers(1, 60, n), np.array([60.0, 400, 400, 400, 150])
    cluster = Cluster(n, total, least, most)
    policy = policies.create(f"lbbsp-gpu:knee={knee}", cluster)
    plan, state = policy.init()
    loads = plan.shares * total
    plan, state = policy.step(state, Round(plan.shares, cost.seconds(loads), total, cost.overhead))
    _, soon = soonest(cost.seconds_per_sample, cost.overhead, total, np.maximum(least, knee), most)
    assert cost.seconds(plan.shares * total).max() == pytest.approx(soon, rel=1e-6)
    assert np.all(whole_samples(plan, total, cluster.least, cluster.most) <= most)


def test_gpu_communication_is_a_moving_average():
    """LB-BSP, section 3.3."""
    policy = policies.create("lbbsp-gpu", Cluster(2, 100))
    plan, state = policy.init()
    for wait, expected in ((0.1, 0.1), (0.2, 0.12), (0.2, 0.136)):
        overhead = np.array([wait, 0.0])
        seen = Round(plan.shares, overhead + plan.shares, 100, overhead)
        plan, state = policy.step(state, seen)
        np.testing.assert_allclose(state.overhead, [expected, 0])


def test_forecasts_are_chosen_by_name_and_kept_apart():
    costs = moving(120)
    last, mean = (play(f"lbbsp-cpu:forecast={f}", costs, 512)[0] for f in ("last", "ema"))
    assert last < 1.09 < mean  # an average is late where the role of the straggler moves


def test_absent_worker_gets_no_sample_and_costs_of_those_present_are_the_forecast():
    policy = policies.create("lbbsp-cpu:forecast=last", Cluster(3, 70))
    plan, state = policy.init()
    loads = plan.shares * 70
    plan, state = policy.step(state, Round(plan.shares, np.array([1e-3, 2e-3, 4e-3]) * loads, 70))
    np.testing.assert_allclose(plan.costs.seconds_per_sample, [1e-3, 2e-3, 4e-3])
    np.testing.assert_allclose(plan.shares * 70, [40, 20, 10])
    seconds = np.array([1e-3, np.nan, 4e-3]) * plan.shares * 70
    plan, state = policy.step(state, Round(plan.shares, seconds, 70))
    np.testing.assert_allclose(plan.costs.seconds_per_sample, [1e-3, np.inf, 4e-3])
    np.testing.assert_allclose(plan.shares * 70, [56, 0, 14])


def test_cpu_shares_stay_within_the_limits():
    costs = constant([1e-3, 2e-3, 4e-3], 0.0, 2)
    _, played, _, _ = play("lbbsp-cpu", costs, 70, least=[0, 0, 16], most=[30, 70, 70])
    np.testing.assert_allclose(played[1], [30, 24, 16])


def test_gpu_communication_of_a_late_report_counts_once():
    policy = policies.create("lbbsp-gpu", Cluster(2, 100))
    plan, state = policy.init()
    for wait, late in (([0.1, 0.3], [False, False]), ([0.2, 0.5], [False, True])):
        overhead, gradients = np.array(wait), Gradients(np.nan, np.array(late))
        told = Round(plan.shares, overhead + plan.shares, 100, overhead, gradients=gradients)
        plan, state = policy.step(state, told)
    np.testing.assert_allclose(state.overhead, [0.12, 0.3])


def test_gpu_knee_must_fit_into_every_workers_limits():
    for knee, limits in ((-1, {}), (31, {"most": [30, 100]}), (51, {}), (30, {"least": [75, 0]})):
        with pytest.raises(PacelineError, match=f"knee={knee}: not all 2 workers can take as many"):
            policies.create(f"lbbsp-gpu:knee={knee}", Cluster(2, 100, **limits))
    for knee, limits in ((30, {"most": [30, 100]}), (50, {}), (25, {"least": [75, 0]})):
        assert policies.create(f"lbbsp-gpu:knee={knee}", Cluster(2, 100, **limits)).knee == knee
    plan, _ = policies.create("lbbsp-gpu", Cluster(2, 100)).init()
    np.testing.assert_allclose(plan.shares, 0.5)


def test_gpu_load_is_at_least_the_knee():
    _, played, _, _ = play("lbbsp-gpu:knee=20", constant([1e-3, 9e-3], 0.0, 2), 100)
    np.testing.assert_allclose(played[1], [80, 20])
