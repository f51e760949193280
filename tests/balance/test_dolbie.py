"""DOLBIE's own claims: feasibility, both algorithms on one path, and what its step does to it."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline import Cluster, PacelineError, Round, policies
from paceline.balance import dolbie
from paceline.costs import Increasing, Linear, Saturating
from paceline.shares import water_level

from .streams import constant, drifting, play

BATCH = 256


def random_system(seed, rounds=60):
    rng = np.random.default_rng(seed)
    n = int(rng.integers(2, 12))
    gamma = rng.choice([3000.0, 1000, 100, 40], n)
    return n, [
        Linear(np.exp(0.1 * rng.standard_normal(n)) / gamma, rng.uniform(0, 0.03, n)) for _ in range(rounds)
    ]


def algorithm_1(n, costs, first):
    """The listing, line by line, with scalars; two workers have eq. (7) of three. first: the step size asked for."""
    x = [1 / n] * n
    more = max(n - 2, 1)
    alpha = min(first, min(x) / (more + min(x)))
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
        alpha = min(alpha, x[s] / (more + x[s]))
        path.append(list(x))
    return np.array(path), alpha


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), first=st.sampled_from([1.0, 0.04, 0.001]))  # 0.001: the experiments'
def test_walks_the_path_of_the_listing(seed, first):
    """DOLBIE, eqs. (4) to (7), Alg. 1, lines 1 to 16, section VI-A."""
    n, costs = random_system(seed)
    path, alpha = algorithm_1(n, costs, first)
    _, played, plan, state = play(f"dolbie:floor=0,alpha={first}", costs, BATCH)
    np.testing.assert_allclose([*(played / BATCH), plan.shares], path, atol=1e-12)
    assert state.alpha == pytest.approx(alpha, abs=1e-12)


def known(text, costs):
    """Shares of each round and after the last, if the costs of a finished round are known, as in the paper."""
    policy = policies.create(text, Cluster(costs[0].overhead.size, BATCH))
    plan, state = policy.init()
    path = [plan.shares]
    for cost in costs:
        seconds = cost.seconds(plan.shares * BATCH)
        plan, state = policy.step(state, Round(plan.shares, seconds, BATCH, cost.overhead, costs=cost))
        path.append(plan.shares)
    return np.array(path)


def peers_path(costs, **options):
    peers = dolbie.start_peers(costs[0].overhead.size, **options)
    path = [[p.share for p in peers]]
    for cost in costs:
        peers, _ = dolbie.play_round(peers, cost, BATCH)
        path.append([p.share for p in peers])
    return np.array(path)


@pytest.mark.parametrize(
    ("text", "options"),
    [("dolbie", {}), ("dolbie:floor=0", {"floor": 0.0}), ("dolbie:floor=0.5", {"floor": 0.5})],
)
@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32 - 1))
def test_peers_walk_the_same_path_as_the_master(text, options, seed):
    _, costs = random_system(seed)
    path = peers_path(costs, **options)
    np.testing.assert_allclose(path.sum(-1), 1, rtol=0, atol=1e-12)
    np.testing.assert_allclose(path, known(text, costs), rtol=0, atol=1e-11)


def test_peers_with_an_emptied_straggler_stay_with_the_master():
    """One of three workers gives away nearly all it has, then another one is slow: only the floor moves them."""
    costs = constant([1e-6, 1e-6, 1.0], 0.0, 1) + constant([1e-3, 4e-3, 1e-3], 0.0, 400)
    path = peers_path(costs)
    np.testing.assert_allclose(path, known("dolbie", costs), rtol=0, atol=1e-12)
    assert np.abs(path[-1] - known("dolbie:floor=0", costs)[-1]).max() > 0.05


def test_messages_of_a_round_are_those_of_a_delivery():
    """DOLBIE, section IV-C: each list holds the numbers of one message to one receiver, as the listings send them."""
    for n in (2, 3, 7):
        others = n - 1  # workers that are not the straggler
        first = [["l_i"]] * n + [["l", "alpha", "i != s"]] * n + [["x_i"]] * others + [["x_s"]]
        assert dolbie.with_master(n) == (len(first), sum(map(len, first)))
        second = [["l_i", "alpha_i", "safe_i"]] * (n * others) + [["x_i"]] * others
        _, traffic = dolbie.play_round(
            dolbie.start_peers(n), constant(np.arange(1.0, n + 1), 0.0, 1)[0], BATCH
        )
        assert traffic == (len(second), sum(map(len, second)))


def test_peers_send_their_shares_to_the_straggler_alone():
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
    """DOLBIE, section IV-B."""

    def first(text, workers):
        return policies.create(text, Cluster(workers, BATCH)).init()[1].alpha.item()

    assert first("dolbie", 30) == pytest.approx(1 / 29**2)
    assert first("dolbie:alpha=0.001", 30) == 0.001
    # The paper's 0.001 would violate eq. (7) from 33 workers on.
    assert first("dolbie:alpha=0.001", 40) == pytest.approx(1 / 39**2)
    assert first("dolbie", 2) == pytest.approx(0.5 / 1.5)  # that of three workers: eq. (7) is 1
    assert first("dolbie:alpha=0.1", 2) == 0.1


@pytest.mark.parametrize("options", ["", ":monotone=no", ":tight=yes", ":monotone=no,tight=yes"])
def test_two_workers_reach_the_optimum(options):
    """With a step of 1, eq. (7) for two, the shares alternate between two points of 2.56 s."""
    costs = constant([0.01, 0.02], 0.0, 30)
    _, played, _, _ = play("dolbie" + options, costs, BATCH)
    seconds = [cost.seconds(loads).max() for cost, loads in zip(costs, played, strict=True)]
    assert seconds[0] == pytest.approx(2.56)
    np.testing.assert_allclose(seconds[5:], 256 / (100 + 50), rtol=1e-6)  # 100 and 50 samples a second


@settings(max_examples=100, deadline=None)
@given(
    workers=st.lists(
        st.tuples(st.floats(-3, 0).map(lambda power: 10**power), st.floats(0, 1)), min_size=2, max_size=6
    )
)
def test_no_round_is_longer_than_the_one_before_or_than_equal_shares(workers):
    """As long as costs stay as they are, with a master and without; equal shares are the first round."""
    cost = Linear(*np.array(workers).T)
    possible = max(water_level(cost, BATCH).seconds.item(), cost.overhead.max())  # without load, too
    for path in (known("dolbie", [cost] * 120), peers_path([cost] * 120)):
        np.testing.assert_allclose(path.sum(-1), 1, rtol=0, atol=1e-12)
        seconds = cost.seconds(path * BATCH).max(-1)
        assert np.all(np.diff(seconds) <= 1e-9 * seconds[:-1])
        # The rounds get shorter by a part of what is possible: nearly all of it for two workers.
        part = 0.97 if len(workers) == 2 else 0.3
        assert seconds[0] - seconds[-1] >= part * (seconds[0] - possible) - 1e-9


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


def test_worker_whose_load_takes_only_its_overhead_could_take_everything():
    """DOLBIE, eq. (4): its cost is flat, x' = 1, whether costs are known or only seconds are measured."""
    costs = constant([0.0, 1e-3, 4e-3], [0.02, 0.01, 0.01], 6)
    path, alpha = [np.full(3, 1 / 3)], (1 / 3) / (1 + 1 / 3)
    for cost in costs:  # the slowest is always worker 2
        x = path[-1]
        level = cost.seconds(x * BATCH)[2]
        more = np.array([1.0, min(1.0, (level - 0.01) / 1e-3 / BATCH)])
        new = x[:2] + alpha * (more - x[:2])
        path.append(np.append(new, 1 - new.sum()))
        alpha = min(alpha, path[-1][2] / (1 + path[-1][2]))
    _, played, plan, _ = play("dolbie:floor=0", costs, BATCH)
    np.testing.assert_allclose([*(played / BATCH), plan.shares], path, atol=1e-12)
    np.testing.assert_allclose(known("dolbie:floor=0", costs), path, atol=1e-12)


@pytest.mark.parametrize(
    "start", ["3/1", "3/1/1/1", "3/x/1", "3/-1/1", "0/0/0", "nan/1/1", "inf/1/1", "3;1;1"]
)
def test_start_that_is_no_partition_raises(start):
    with pytest.raises(PacelineError, match=r"policy 'dolbie': start=.*expected 3 numbers with '/' between"):
        policies.create(f"dolbie:start={start}", Cluster(3, BATCH))
    with pytest.raises(PacelineError, match="expected 3 numbers"):
        dolbie.start_peers(3, start=start)


def test_start_keeps_to_limits():
    policy = policies.create("dolbie:start=3/1/0", Cluster(3, 100, most=[50, 100, 100], least=[0, 0, 10]))
    np.testing.assert_allclose(policy.init()[0].shares, [0.5, 0.4, 0.1])


def test_equal_times_are_a_fixed_point():
    shares = np.array([0.5, 0.3, 0.2])
    policy = policies.create("dolbie", Cluster(3, 100))
    state = policy.init()[1]._replace(shares=shares)
    plan, _ = policy.step(state, Round(shares, np.full(3, 2.0), 100))
    np.testing.assert_allclose(plan.shares, shares, atol=1e-15)


def test_shares_kept_for_a_worker_that_was_away_are_within_the_limits_when_it_is_back():
    """Beside one other worker the slow one sinks to its least, a third; that must hold in three, too."""
    policy = policies.create("dolbie", Cluster(3, 120, least=[40, 0, 0]))
    plan, state = policy.init()
    for _ in range(60):
        plan, state = policy.step(state, Round(plan.shares, np.array([9.0, 1.0, np.nan]), 120))
    assert plan.shares[0] == pytest.approx(1 / 3, abs=0.02)
    plan, state = policy.step(state, Round(plan.shares, np.full(3, 1.0), 120))
    assert plan.shares[0] >= 1 / 3 - 1e-12
