"""LB-BSP proper, on CPU and GPU clusters."""

import numpy as np
import pytest
from scipy.optimize import linprog

from paceline import Cluster, Round, policies
from paceline.costs import Linear
from paceline.shares import whole_samples

from .streams import constant, moving, play

SLOPES = np.array([1e-3, 2e-3, 4e-3, 1e-3])


def test_cpu_shares_follow_speeds_for_any_communication():
    waits = np.array([0.0, 0.5, 0.1, 0.0])
    _, played, _, _ = play("lbbsp-cpu", constant(SLOPES, waits, 3), 256)
    np.testing.assert_allclose(played[1:], np.tile(256 / SLOPES / (1 / SLOPES).sum(), (2, 1)))


@pytest.mark.parametrize("seed", range(5))
def test_gpu_shares_solve_the_papers_linear_programme(seed):
    """LB-BSP, eq. (5)."""
    rng = np.random.default_rng(seed)
    n, total = 5, 400
    cost = Linear(rng.uniform(1e-3, 5e-3, n), rng.uniform(0, 0.2, n))
    knee, most = 20.0, np.array([60.0, 400, 400, 400, 150])
    cluster = Cluster(n, total, most=most)
    policy = policies.create(f"lbbsp-gpu:knee={knee}", cluster)
    plan, state = policy.init()
    loads = plan.shares * total
    plan, state = policy.step(state, Round(plan.shares, cost.seconds(loads), total, cost.overhead))
    rows = np.hstack([np.diag(cost.seconds_per_sample), -np.ones((n, 1))])
    bounds = [*zip(np.full(n, knee), most, strict=True), (None, None)]
    objective, sums = np.r_[np.zeros(n), 1], np.r_[np.ones(n), 0][None]
    answer = linprog(objective, rows, -cost.overhead, sums, [total], bounds)
    assert cost.seconds(plan.shares * total).max() == pytest.approx(answer.fun, rel=1e-6)
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
