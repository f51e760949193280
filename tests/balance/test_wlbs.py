"""WLBS: the first division, the pair's equalisation, and where it stops."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline import Cluster, Machines, Round, policies
from paceline.balance.wlbs import _mean, _pair, initial_weights, largest_remainder
from paceline.errors import PacelineError
from paceline.rounds import Gradients

from .streams import constant, play


def test_the_first_division_follows_cpus_cores_and_memory():
    """WLBS, section 3.2 (first division)."""
    machines = Machines(np.array([1.0, 1, 2]), np.array([4.0, 8, 4]), np.array([8.0, 8, 8]))
    weights = initial_weights(machines)
    np.testing.assert_allclose(
        weights, np.mean([[1 / 4, 1 / 4, 1 / 2], [1 / 4, 1 / 2, 1 / 4], [1 / 3] * 3], axis=0)
    )
    plan, _ = policies.create("wlbs:micro=16", Cluster(3, 480, machines=machines)).init()
    loads = plan.shares * 480
    np.testing.assert_allclose(loads % 16, 0, atol=1e-9)  # whole micro-batches
    np.testing.assert_allclose(loads, weights * 480, atol=16)


def test_largest_remainders_get_the_units_that_are_left():
    np.testing.assert_array_equal(largest_remainder(np.array([10.6, 10.9, 8.5]), 1), [11, 11, 8])
    np.testing.assert_array_equal(largest_remainder(np.array([33.0, 33.0, 34.0]), 10), [30, 30, 40])


def test_a_pair_is_equalised_to_the_micro_batch():
    """Two workers 1 : 3; a linear cost makes one adjustment enough."""
    slopes = np.array([1e-3, 3e-3])
    _, played, _, _ = play("wlbs:micro=8,period=5,epoch=0", constant(slopes, 0.0, 11), 256)
    np.testing.assert_allclose(played[:5], np.full((5, 2), 128.0))
    np.testing.assert_allclose(played[5:], np.tile([192.0, 64], (6, 1)))


def test_only_the_best_and_the_worst_change():
    _, played, _, _ = play("wlbs:micro=1,period=1,epoch=0", constant([1.0, 2.0, 3.0, 4.0], 0.0, 2), 400)
    moved = played[1] - played[0]
    assert moved.tolist() == [60, 0, 0, -60]  # (100 / 1 + 100 / 4 samples a second: 4 : 1 of 200)


def test_adjusting_stops_within_theta_and_continues_beyond():
    close = constant([1.0, 1.04], 0.0, 30)
    assert np.ptp(play("wlbs:micro=1,epoch=0,theta=0.05", close, 1000)[1], axis=0).max() == 0
    assert np.ptp(play("wlbs:micro=1,epoch=0,theta=0.01", close, 1000)[1], axis=0).max() > 0


def test_major_adjustments_are_finer_and_come_with_the_epoch():
    """WLBS, section 3.2 (adjustments)."""
    costs = constant([1.0, 2.0], 0.0, 31)
    _, played, _, _ = play("wlbs:micro=64,period=5,epoch=20,theta=0.001", costs, 512)
    np.testing.assert_allclose(played[5:20], np.tile([320.0, 192], (15, 1)))  # whole micro-batches of 64
    np.testing.assert_allclose(played[20:], np.tile([341.0, 171], (11, 1)))  # single samples


def test_a_dead_worker_gives_all_it_has():
    """WLBS, section 3.2 (dead node)."""
    policy = policies.create("wlbs:micro=8,period=4,epoch=0", Cluster(3, 240))
    plan, state = policy.init()
    slopes = np.array([1.0, 1.0, 1.0])
    for _ in range(8):
        seconds = np.where([True, True, False], slopes * plan.shares * 240, np.nan)
        plan, state = policy.step(state, Round(plan.shares, seconds, 240))
    assert state.loads[2] == 0
    assert state.loads.sum() == pytest.approx(240)
    np.testing.assert_allclose(plan.shares[:2].sum(), 1)


def test_limits_bound_what_changes_hands():
    costs = constant([1.0, 9.0], 0.0, 40)
    _, played, _, _ = play("wlbs:micro=8,epoch=10", costs, 256, most=[150, 256])
    assert played[:, 0].max() <= 150
    assert played[-1, 0] == pytest.approx(150, abs=1)


@given(st.integers(0, 2**32 - 1))
@settings(max_examples=30)
def test_the_pair_is_the_best_and_the_worst_since_the_last_adjustment(seed: int):
    """WLBS, section 3.2 (adjustments): both kinds, with speeds that change within an epoch."""
    rng = np.random.default_rng(seed)
    period, epoch, batch = 3, 7, 400
    policy = policies.create(f"wlbs:micro=1,period={period},epoch={epoch},theta=0", Cluster(4, batch))
    plan, state = policy.init()
    since: list[np.ndarray] = []  # seconds of each sample in the rounds since the last adjustment
    for number in range(1, 29):
        slopes = rng.uniform(1.0, 4.0, 4)
        since.append(slopes)
        before = state
        plan, state = policy.step(state, Round(plan.shares, slopes * plan.shares * batch, batch))
        moved = state.loads - before.loads
        if len(since) == period or number % epoch == 0:
            expected = np.mean(since, axis=0) * before.loads  # the load was the same in all of them
            assert set(np.flatnonzero(moved)) <= {np.argmin(expected), np.argmax(expected)}
            assert moved[np.argmin(expected)] >= 0
            since.clear()
        else:
            assert not moved.any()


def test_seconds_that_were_reported_before_count_once():
    """A worker of which nothing came since the last round, as under limited synchronous parallel."""
    policy = policies.create("wlbs:micro=8,period=4,epoch=0", Cluster(2, 240))
    plan, state = policy.init()
    seconds = np.array([1.0, 3.0])
    late = np.array([False, True])
    for again in (np.zeros(2, bool), late, late):
        _, state = policy.step(state, Round(plan.shares, seconds, 240, gradients=Gradients(np.nan, again)))
    assert state.cycle.reports.tolist() == [3, 1]
    assert state.cycle.loads.tolist() == [360, 120]


@pytest.mark.parametrize(("batch", "slopes", "moved"), [(256, [1, 9, 9, 15], 56), (8, [1, 9, 9, 15], 2)])
def test_a_micro_batch_is_a_sixteenth_of_an_equal_share_or_one_sample(batch, slopes, moved):
    _, played, _, _ = play("wlbs:period=1,epoch=0", constant(slopes, 0.0, 2), batch)
    assert played[1, 0] - played[0, 0] == moved


@pytest.mark.parametrize("option", ["micro=-1", "micro=241", "period=0", "epoch=-1", "theta=-0.01"])
def test_wlbs_with_values_that_make_no_sense_raises(option):
    with pytest.raises(PacelineError, match=f"policy 'wlbs': {option}"):
        policies.create(f"wlbs:{option}", Cluster(2, 240))
    assert policies.create("wlbs:micro=240,period=1,epoch=0,theta=0", Cluster(2, 240)).needs_machines


def test_mean_over_workers_leaves_out_those_without_a_value():
    values = np.array([[2.0, np.nan, 4.0], [np.nan, np.nan, 6.0], [np.nan] * 3])
    assert _mean(values).tolist() == [[3], [6], [1]]
    best, worst = np.array([[0], [2]]), np.array([[1], [0]])
    values = np.array([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])
    assert [each.tolist() for each in _pair(values, best, worst)] == [[[1], [6]], [[2], [4]]]
