"""One rule for shares and for how many gradients to wait for."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline import Cluster, Round, policies
from paceline.balance.joint import FEWEST, gain_a_second
from paceline.errors import PacelineError
from paceline.paramserver.config import ServerConfig
from paceline.paramserver.samples import Draws
from paceline.rounds import Gradients
from paceline.simulate.server import RoundTrips, SimulatedServer
from paceline.simulate.timing import Constant, Exponential
from support.guarantees import guarantee
from support.quadratic import Quadratic

BATCH = 128


def play(name, seconds_of, rounds, noise_scale, n=4):
    policy = policies.create(name, Cluster(n, BATCH, least=np.ones(n)))
    plan, state = policy.init()
    plans, trips = [], np.ones(n)
    for t in range(rounds):
        loads = plan.shares * BATCH
        seconds = seconds_of(t, loads)
        late = seconds > np.sort(seconds)[(plan.quorum or n) - 1]
        told = None if noise_scale is None else Gradients(noise_scale, late)
        trips = np.where(late, trips, seconds)
        plan, state = policy.step(state, Round(plan.shares, trips, BATCH, gradients=told))
        plans.append(plan)
    return plans


def stalling(seed, paces):
    """Seconds whose pace is certain but for exponential stalls of each task."""
    rng = np.random.default_rng(seed)
    return lambda t, loads: loads * paces * (0.3 + rng.exponential(0.7, len(paces)))


@guarantee("`joint` plans as `level` does to the last bit, in an engine that uses every gradient.")
def test_it_is_level_where_no_gradient_may_be_lost():
    paces = np.array([1.0, 1.0, 2.0, 4.0]) * 1e-3
    ours, level = (play(name, stalling(1, paces), 40, None) for name in ("joint", "level"))
    for mine, theirs in zip(ours, level, strict=True):
        assert mine.quorum is None
        np.testing.assert_array_equal(mine.shares, theirs.shares)
        np.testing.assert_array_equal(mine.costs.seconds_per_sample, theirs.costs.seconds_per_sample)


def test_it_waits_for_all_who_are_steady_and_divides_as_level_does():
    paces = np.array([1.0, 1.0, 2.0, 4.0]) * 1e-3
    for plan in play("joint", lambda t, loads: loads * paces, 30, 500.0):
        assert plan.quorum is None
    np.testing.assert_allclose(plan.shares, (1 / paces) / (1 / paces).sum(), rtol=1e-6)


@pytest.mark.parametrize("mode", ["push-wait", "push-interrupt"])
def test_the_less_noise_the_fewer_gradients(mode):
    paces = np.full(8, 1e-3)
    waited = []
    for noise_scale in (1.0, 100.0, 1e6):
        plans = play(f"joint:mode={mode}", stalling(3, paces), 60, noise_scale, n=8)
        assert [plan.quorum for plan in plans[: FEWEST - 1]] == [None] * (FEWEST - 1)
        waited.append(np.mean([plan.quorum or 8 for plan in plans[20:]]))
        assert all(plan.shares.sum() == pytest.approx(1) and plan.shares.min() > 0 for plan in plans)
    assert waited[0] <= waited[1] <= waited[2]
    assert waited[0] < 3
    assert waited[2] > 4


def test_who_stalls_for_long_is_not_waited_for():
    """A worker whose task now and then takes a hundred times as long."""
    rng = np.random.default_rng(0)

    def seconds_of(t, loads):
        return loads * 1e-3 * np.array([1, 1, 1, 100 if rng.random() < 0.5 else 1])

    plans = play("joint:mode=push-interrupt", seconds_of, 60, 1e4)
    assert np.mean([plan.quorum == 3 for plan in plans[20:]]) > 0.9


@settings(deadline=None, max_examples=40)
@given(st.integers(0, 10**6), st.integers(1, 5), st.booleans(), st.floats(0, 1e4))
def test_the_gain_a_second_is_that_of_updates_played_one_by_one(seed, n, interrupts, noise_scale):
    rng = np.random.default_rng(seed)
    seconds, loads = rng.exponential(1.0, (12, n)), rng.integers(1, 50, n).astype(float)
    k = int(rng.integers(1, n + 1))
    free, now, gains, begun = [0.0] * n, 0.0, [], 0.0
    for task in range(12):
        ends = [at + took for at, took in zip(free, seconds[task], strict=True)]
        update = sorted(ends)[k - 1]
        samples = sum(load for load, end in zip(loads, ends, strict=True) if end <= update)
        for worker, end in enumerate(ends):
            if end <= update or interrupts:
                free[worker] = update  # it begins again
            elif free[worker] < update:
                free[worker] = end  # it ends first what is of no use
        now = update
        if task < 3:
            begun = now
        else:
            gains.append(samples / (samples + noise_scale))
    found = gain_a_second(seconds[:, None], loads, k, noise_scale, interrupts)
    assert found == pytest.approx(sum(gains) / (now - begun))


def served(policy, mode, backup="everyone", sync="bsp"):
    config = ServerConfig(8, BATCH, sync=sync, mode=mode, backup=backup, policy=policy, lr=0.02)
    trips = RoundTrips(8, Exponential(0.05), Constant(np.repeat([1e-3, 3e-3], 4)), 4)
    run = SimulatedServer(Quadratic(400, 5, mean=3.0), config, trips, Draws(400, 1))
    return run.run(updates=60), run


@pytest.mark.parametrize("mode", ["push-wait", "push-interrupt", "pull"])
def test_a_parameter_server_waits_for_as_many_as_it_plans(mode):
    updates, _ = served("joint", mode)
    assert all(u.quorum == 8 for u in updates[:FEWEST])
    assert min(u.quorum for u in updates) < 8
    assert all(u.quorum >= min(u.wanted, 8) for u in updates[1:])
    level, _ = served("level", mode)
    assert updates[-1].ended < 0.8 * level[-1].ended


def test_given_backup_policy_has_priority():
    updates, _ = served("joint", "push-wait", "static:7")
    assert {u.quorum for u in updates} == {7}


def test_gate_that_asks_no_worker_is_left_alone():
    _, run = served("joint", "push-wait", sync="ssp:2")
    _, same = served("level", "push-wait", sync="ssp:2")
    np.testing.assert_array_equal(run.parameters.values, same.parameters.values)


def test_server_reports_what_late_workers_do():
    config = ServerConfig(4, BATCH, policy="joint", mode="push-interrupt")
    assert config.build().balancer.policy.mode == "push-interrupt"


def test_another_mode_than_a_server_has_is_refused() -> None:
    with pytest.raises(PacelineError, match="mode"):
        policies.create("joint:mode=late", Cluster(2, 64))
