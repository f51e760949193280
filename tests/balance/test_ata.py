"""The bandit of adaptive task allocation: its division against brute force, its bound, and how its regret grows."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import binom

from paceline import Cluster, PacelineError, Round, policies
from paceline.costs import Linear
from paceline.shares import whole_samples


def best_by_brute_force(bounds: np.ndarray, batch: int) -> float:
    n = len(bounds)
    every = (a for a in itertools.product(range(batch + 1), repeat=n - 1) if sum(a) <= batch)
    return min(float((np.array([*a, batch - sum(a)]) * bounds).max()) for a in every)


def play(
    text: str, means: np.ndarray, batch: int, rounds: int, runs: int = 1, scale: float = np.inf
) -> tuple[np.ndarray, np.ndarray]:
    """Whole loads of each round, (rounds, runs, n), and regrets, (rounds, runs). Each sample takes an exponential
    time of its own, of which a part of this scale at most is not certain."""
    rng, scales = np.random.default_rng(0), np.minimum(means, scale)
    policy = policies.create(text, Cluster(len(means), batch, realizations=(runs,)))
    plan, state = policy.init()
    loads = np.empty((rounds, runs, len(means)))
    for k in range(rounds):
        loads[k] = whole_samples(plan, batch)
        seconds = loads[k] * (means - scales) + rng.gamma(loads[k], scales)  # a sum of exponential times
        plan, state = policy.step(state, Round(loads[k] / batch, seconds, batch))
    best = whole_samples(Linear(means, np.zeros(len(means))), batch)
    return loads, (loads * means).max(-1) - (best * means).max()


@settings(deadline=None, max_examples=60)
@given(st.lists(st.floats(0.1, 10), min_size=2, max_size=4), st.integers(1, 7))
def test_its_whole_division_has_the_smallest_maximum_of_all(paces, batch):
    policy = policies.create("ata", Cluster(len(paces), batch))
    plan, state = policy.init()
    shares = np.full(len(paces), 1 / len(paces))
    plan, state = policy.step(state, Round(shares, shares * batch * paces, batch))
    bounds = policy.lower_bound(state)
    loads = whole_samples(plan, batch)
    assert loads.sum() == batch
    assert (loads * bounds).max() == pytest.approx(best_by_brute_force(bounds, batch), rel=1e-9)


def test_the_bound_is_the_one_derived():
    cluster, loads = Cluster(2, 10), np.array([4.0, 6.0])
    for text, scale in ("ata:alpha=0.05", None), ("ata:eta=0.5", 0.5):
        policy = policies.create(text, cluster)
        _, state = policy.init()
        for pace in ([1.0, 2.0], [3.0, 2.0], [2.0, 2.0]):
            _, state = policy.step(state, Round(loads / 10, loads * pace, 10))
        level = np.log(2 * 3**2)
        radius = np.sqrt(2 * level / 3) + level / 3
        expected = 2 - 0.05 * radius if scale is None else 2 / (1 + scale * radius)
        np.testing.assert_allclose(policy.lower_bound(state), expected)


def test_bound_is_not_below_zero_and_is_zero_while_nothing_is_known():
    policy = policies.create("ata:alpha=100", Cluster(2, 10))
    _, state = policy.init()
    _, state = policy.step(state, Round(np.array([1.0, 0.0]), np.array([5.0, 0.0]), 10))
    assert policy.lower_bound(state).tolist() == [0.0, 0.0]
    assert (state.observed.tolist(), state.seconds.tolist()) == ([1.0, 0.0], [0.5, 0.0])


@settings(deadline=None, max_examples=40)
@given(st.integers(0, 10**6), st.floats(0.1, 10))
def test_the_bound_is_seldom_above_the_mean(seed, mean):
    """Of exponential seconds, whose scale is their mean: in round k with probability 1 / (2 k^2) at most, as it is
    off to either side with 1 / k^2. If that is so, a seed fails here by chance with probability 3e-9 at most."""
    rng, n = np.random.default_rng(seed), 1000  # workers, of which each is one more independent trial
    policy = policies.create("ata:eta=1", Cluster(n, n))
    _, state = policy.init()
    for k in range(1, 41):
        _, state = policy.step(state, Round(np.full(n, 1 / n), rng.exponential(mean, n), n))
        if k in (10, 20, 40):
            assert (policy.lower_bound(state) > mean).sum() <= binom.isf(1e-9, n, 1 / (2 * k**2))


@pytest.mark.parametrize(("text", "scale"), [("ata:eta=1", np.inf), ("ata:alpha=0.1", 0.1)])
def test_regret_grows_as_the_logarithm_of_the_rounds(text, scale):
    means = np.array([0.2, 0.35, 0.5, 0.9])
    regret = np.cumsum(play(text, means, 12, 4000, 4, scale)[1].mean(-1))
    early, middle, late = regret[249], regret[999], regret[3999]
    assert late > 0
    assert late - middle < 1.5 * (middle - early) + 1e-9  # four times as many rounds: the same again
    assert late - middle < 0.25 * 3000 / 250 * early  # far from a line


def test_a_slow_worker_is_tried_ever_less_often():
    loads = play("ata:eta=1", np.array([0.1, 0.1, 1.5]), 8, 3000)[0][:, 0]
    tried = loads[:, 2] > 0
    assert tried[:300].sum() > tried[-1500:].sum() >= 0
    assert loads[-1000:, :2].mean() == pytest.approx(4, abs=0.02)


def test_who_is_unknown_is_tried_first():
    policy = policies.create("ata", Cluster(3, 9))
    _, state = policy.init()
    seconds = np.array([3.0, 3.0, np.nan])
    plan, state = policy.step(state, Round(np.array([0.5, 0.5, 0.0]), seconds, 9))
    assert not whole_samples(plan, 9)[2]  # it is away
    seconds = np.array([3.0, 3.0, 0.0])
    plan, _ = policy.step(state, Round(np.array([0.5, 0.5, 0.0]), seconds, 9))
    np.testing.assert_array_equal(whole_samples(plan, 9), [0, 0, 9])


@pytest.mark.parametrize("text", ["ata:alpha=-1", "ata:eta=-0.5", "ata:eta=nan"])
def test_what_is_no_scale_is_refused(text):
    with pytest.raises(PacelineError, match=r"expected (seconds|a ratio), 0 or more"):
        policies.create(text, Cluster(2, 4))
