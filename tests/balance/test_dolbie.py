"""DOLBIE's own claims: feasibility, both algorithms on one path, and what its step does to it."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline import Cluster, PacelineError, Round, policies
from paceline.balance import dolbie
from paceline.costs import Increasing, Linear, Saturating

from .streams import constant, drifting, play

BATCH = 256


def random_system(seed, rounds=60):
    rng = np.random.default_rng(seed)
    n = int(rng.integers(3, 12))  # (two workers go to and fro, and magnify rounding)
    gamma = rng.choice([3000.0, 1000, 100, 40], n)
    return n, [
        Linear(np.exp(0.1 * rng.standard_normal(n)) / gamma, rng.uniform(0, 0.03, n)) for _ in range(rounds)
    ]


def algorithm_1(n, costs):
    """The listing, line by line, with scalars."""
    x = [1 / n] * n
    alpha = min(x) / (n - 2 + min(x)) if n > 1 else 1.0
    path = [list(x)]
    for cost in costs:
        f = [
            lambda b, i=i, cost=cost: cost.overhead[i] + cost.seconds_per_sample[i] * b * BATCH
            for i in range(n)
        ]
        lengths = [f[i](x[i]) for i in range(n)]
        level = max(lengths)
        s = lengths.index(level)
        for i in range(n):
            if i != s:
                most = min(1.0, (level - cost.overhead[i]) / cost.seconds_per_sample[i] / BATCH)
                x[i] = x[i] - alpha * (x[i] - most)
        x[s] = 1 - sum(x[:s] + x[s + 1 :])
        alpha = min(alpha, x[s] / (n - 2 + x[s])) if n - 2 + x[s] > 0 else 0.0
        path.append(list(x))
    return np.array(path), alpha


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32 - 1))
def test_walks_the_path_of_the_listing(seed):
    """DOLBIE, Alg. 1, lines 1 to 16."""
    n, costs = random_system(seed)
    path, alpha = algorithm_1(n, costs)
    _, played, plan, state = play("dolbie:floor=0", costs, BATCH)
    np.testing.assert_allclose([*(played / BATCH), plan.shares], path, atol=1e-12)
    assert state.alpha == pytest.approx(alpha, abs=1e-12)


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32 - 1))
def test_peers_walk_the_same_path_as_the_master_and_their_messages_are_counted(seed):
    """DOLBIE, section IV-C."""
    n, costs = random_system(seed)
    _, played, plan, _ = play("dolbie:floor=0", costs, BATCH)
    peers = dolbie.start_peers(n)
    for cost, loads in zip(costs, played, strict=True):
        np.testing.assert_allclose([p.share for p in peers], loads / BATCH, atol=1e-12)
        peers, traffic = dolbie.play_round(peers, cost, BATCH)
        assert traffic == (n * (n - 1) + n - 1, 2 * n * (n - 1) + n - 1)
    np.testing.assert_allclose([p.share for p in peers], plan.shares, atol=1e-12)


def test_peers_tell_their_shares_to_the_straggler_alone():
    """DOLBIE, Alg. 2, lines 1 to 13."""
    peers = dolbie.start_peers(3)
    heard = [dolbie.announce(p, s) for p, s in zip(peers, (1.0, 3.0, 3.0), strict=True)]
    decided = [dolbie.decide(p, 0.5, heard) for p in peers]
    assert [message and message.receiver for _, message in decided] == [1, None, 1]  # the lower of equals
    with pytest.raises(PacelineError, match="workers=0: expected a whole number, 1 to"):
        dolbie.start_peers(0)


@pytest.mark.parametrize("options", ["", ":monotone=no", ":tight=yes", ":monotone=no,tight=yes"])
@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 2**32 - 1))
def test_stays_feasible_and_takes_from_the_straggler_only(options, seed):
    _, costs = random_system(seed)
    _, played, _, _ = play("dolbie" + options, costs, BATCH)
    assert played.min() >= 0
    np.testing.assert_allclose(played.sum(-1), BATCH)
    for t in range(len(costs) - 1):
        change = played[t + 1] - played[t]
        straggler = np.argmax(costs[t].seconds(played[t]))
        assert np.all(np.delete(change, straggler) >= -1e-9)


def test_the_first_step_is_safe():
    def first(text, workers):
        return policies.create(text, Cluster(workers, BATCH)).init()[1].alpha.item()

    assert first("dolbie", 30) == pytest.approx(1 / 29**2)
    assert first("dolbie:alpha=0.001", 30) == 0.001
    # The paper's 0.001 would violate eq. (7) from 33 workers on.
    assert first("dolbie:alpha=0.001", 40) == pytest.approx(1 / 39**2)
    assert first("dolbie", 2) == 1
    assert first("dolbie", 1) == 1


def test_two_workers_swing_by_the_printed_rule_and_settle_with_a_smaller_step():
    costs = constant([1.0, 4.0], 0.0, 100)
    _, played, _, _ = play("dolbie", costs, BATCH)
    np.testing.assert_allclose(played[-2:], [[0.75 * BATCH, 0.25 * BATCH], [BATCH, 0]])
    _, played, _, state = play("dolbie:alpha=0.1", costs, BATCH)
    assert state.alpha <= 0.1
    np.testing.assert_allclose(played[-1], [0.8 * BATCH, 0.2 * BATCH], rtol=0.05)


def test_monotone_steps_collapse_and_the_others_win():
    costs = drifting(100, realizations=10)
    slow, _, _, state = play("dolbie", costs, BATCH)
    quick, *_ = play("dolbie:monotone=no", costs, BATCH)
    assert np.median(state.alpha) < 0.25 / 29**2
    assert quick < slow
    equal, *_ = play("equal", costs, BATCH)
    assert slow < 0.6 * equal


def test_a_straggler_with_nothing_left_ends_all_movement_unless_there_is_a_floor():
    """Eq. (7) may take all the straggler has; the printed step is then 0 for good."""
    before = constant([1e-6, 1e-6, 1.0], 0.0, 1)
    after = constant([1e-3, 4e-3, 1e-3], 0.0, 400)
    _, stuck, _, dead = play("dolbie:floor=0", before + after, BATCH)
    assert dead.alpha < 1e-12
    np.testing.assert_allclose(stuck[-1], stuck[1], atol=1e-6)
    _, played, _, alive = play("dolbie", before + after, BATCH)
    assert alive.alpha > 1e-4
    assert after[0].seconds(played[-1]).max() < 0.8 * after[0].seconds(stuck[-1]).max()


def test_memory_limits_hold_and_the_rest_is_balanced():
    costs = constant([1e-3, 1e-3, 1e-3, 4e-3], 0.0, 600)
    _, played, _, _ = play("dolbie:monotone=no", costs, BATCH, most=[40, 256, 256, 256], least=[0, 0, 0, 20])
    assert np.all(played[:, 0] <= 40 + 1e-9)
    assert np.all(played[:, 3] >= 20 - 1e-9)
    np.testing.assert_allclose(played[-1], [40, 96, 96, 24], rtol=0.02)


@pytest.mark.parametrize(
    "cost",
    [
        Increasing(lambda b: np.array([1.0, 2.0, 5.0]) * (1e-3 * b) ** 1.5, np.full(3, 256.0)),
        Saturating(np.array([1.0, 2, 5]) * 1e-3, np.full(3, 0.01), np.full(3, 16.0), np.full(3, 256.0)),
    ],
    ids=["curved", "saturating"],
)
def test_any_non_decreasing_cost_will_do(cost):
    policy = policies.create("dolbie:monotone=no", Cluster(3, BATCH))
    plan, state = policy.init()
    times = []
    for _ in range(200):
        seconds = cost.seconds(plan.shares * BATCH)
        times.append(seconds.max())
        plan, state = policy.step(state, Round(plan.shares, seconds, BATCH, costs=cost))
    assert times[-1] < 0.55 * times[0]
    assert np.all(np.diff(times) <= 1e-9)


def test_equal_times_are_a_fixed_point():
    shares = np.array([0.5, 0.3, 0.2])
    policy = policies.create("dolbie", Cluster(3, 100))
    state = policy.init()[1]._replace(shares=shares)
    plan, _ = policy.step(state, Round(shares, np.full(3, 2.0), 100))
    np.testing.assert_allclose(plan.shares, shares, atol=1e-15)
