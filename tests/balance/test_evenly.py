"""Equal shares, where a plan that departed from them was not worth it."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.testing import assert_array_equal

from paceline import policies
from paceline.balance import evenly
from paceline.balancer import Balancer
from paceline.rounds import Array, Cluster

ROUNDS = 400


def run(workers: int, batch: int, overhead: float, slopes: Array, noise: Array, policy: str) -> list[Array]:
    """The loads of each round; slopes: seconds per sample, (rounds, n); noise: by which seconds are multiplied."""
    balancer = Balancer(policies.create(policy, Cluster(workers, batch)))
    found = []
    for step, (slope, factor) in enumerate(zip(slopes, noise, strict=True)):
        loads = balancer.loads(step, batch)
        balancer.report(step, loads, (overhead + slope * loads) * factor)
        found.append(loads)
    return found


def noise(workers: int, scatter: float, spikes: float, seed: int) -> Array:
    """Lognormal, with spikes; the first two rounds also warm up."""
    rng = np.random.default_rng(seed)
    shape = (ROUNDS, workers)
    factor = np.exp(scatter * rng.standard_normal(shape))
    factor *= np.where(rng.random(shape) < spikes, rng.uniform(1.5, 4, shape), 1.0)
    factor[:2] *= 3
    return factor


@pytest.mark.parametrize("policy", ["level", "auto"])
@pytest.mark.parametrize(("workers", "scatter", "spikes"), [(2, 0.2, 0.0), (4, 0.2, 0.1), (8, 0.4, 0.1)])
def test_even_workers_whose_seconds_hardly_depend_on_the_load_stay_near_equal_shares(
    policy: str, workers: int, scatter: float, spikes: float
) -> None:
    taken, slope = [], 13e-6
    for seed in range(4):
        factor = noise(workers, scatter, spikes, seed)
        loads = run(workers, 16 * workers, 2e-3, np.full((ROUNDS, workers), slope), factor, policy)
        taken += [2e-3 + slope * one.max() for one in loads[200:]]
    # A worker that has all the others' samples, too, makes this 1.09, 1.28 and 1.66.
    assert np.mean(taken) < 1.08 * (2e-3 + slope * 16)


def test_a_worker_that_becomes_slow_little_by_little_is_followed() -> None:
    slopes = np.full((ROUNDS, 3), 1e-3)
    slopes[:, 2] *= np.minimum(1 + np.arange(ROUNDS) / 50, 4.0)
    loads = run(3, 768, 1e-3, slopes, np.ones((ROUNDS, 3)), "level")
    assert np.abs(loads[-1] - [341, 341, 86]).max() <= 1
    slowest = np.array([(1e-3 + slope * load).max() for slope, load in zip(slopes, loads, strict=True)])
    best = 1e-3 + 768 / (1 / slopes).sum(-1)
    assert best[20:].sum() / slowest[20:].sum() > 0.97


def test_a_worker_that_is_slow_from_the_beginning_is_never_asked_again() -> None:
    slopes = np.tile([1e-3, 1e-3, 4e-3], (ROUNDS, 1))
    for load in run(3, 768, 1e-3, slopes, np.ones((ROUNDS, 3)), "level")[5:]:
        assert np.abs(load - [341, 341, 86]).max() <= 1


NUMBERS = st.floats(1e-4, 10.0)


@given(
    workers=st.integers(1, 9),
    rounds=st.lists(st.tuples(st.booleans(), NUMBERS, st.integers(0, 2**32 - 1)), min_size=1, max_size=60),
)
def test_plain_numbers_and_arrays_decide_alike_to_a_bit(
    workers: int, rounds: list[tuple[bool, float, int]]
) -> None:
    array = evenly.start((workers,))
    plain = array.tolist()
    follows = False
    for were, most, seed in rounds:
        rng = np.random.default_rng(seed)
        seconds, even = rng.uniform(0.5, 2.0, workers), most * rng.uniform(0.5, 1.0, workers)
        were = were or follows
        equal, array = evenly.decide(array, np.array(were), seconds, even)
        follows, plain = evenly.decide_few(plain, were, seconds.tolist(), even.tolist())
        assert bool(equal) == follows
        assert_array_equal(array, plain)


def test_runs_together_are_runs_one_by_one() -> None:
    rng = np.random.default_rng(1)
    states = evenly.start((5, 3))
    alone = [evenly.start((3,)) for _ in range(5)]
    for _ in range(200):
        were, seconds, even = rng.random(5) < 0.4, rng.uniform(0.5, 2, (5, 3)), rng.uniform(1, 9, (5, 3))
        equal, states = evenly.decide(states, were, seconds, even)
        for r in range(5):
            one, alone[r] = evenly.decide(alone[r], were[r], seconds[r], even[r])
            assert bool(one) == equal[r]
            assert_array_equal(alone[r], states[r])
    assert equal.any()
