"""Plain numbers decide as arrays do, to the last bit; and so do machines that are unlike."""

import contextlib
import os
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import special

from paceline import Cluster, few, policies
from paceline.balance import caution
from paceline.balancer import Balancer
from paceline.costs import Linear
from paceline.forecast import kalman, overheads
from paceline.rounds import PieceTimes
from paceline.shares import water_level, whole_samples

SEEDS = st.integers(0, 2**32 - 1)


@contextlib.contextmanager
def arrays_only():
    most, few.FEW = few.FEW, 0
    try:
        yield
    finally:
        few.FEW = most


def same(one, other):
    for left, right in zip(policies.leaves(one), policies.leaves(other), strict=True):
        assert left.dtype == right.dtype
        np.testing.assert_array_equal(left, right)


@given(n=st.integers(1, few.FEW), seed=SEEDS)
def test_sums_are_those_of_arrays(n, seed):
    values = 10 ** np.random.default_rng(seed).uniform(-8, 8, n)
    assert few.total(values.tolist()) == values.sum() == values[None].sum(-1)[0]


def test_logarithms_and_exponentials_are_those_of_the_c_library_to_a_bit():
    values = np.array([0.0, -1.0, np.inf, np.nan, 1e-320, 0.3, 1.0, 1e300])
    with np.errstate(divide="ignore", invalid="ignore"):
        np.testing.assert_allclose(few.log(values), np.log(values), rtol=3e-16)
    powers = np.array([-np.inf, -800.0, -0.7, 0.0, 1.5, 708.0, 709.5, 1000.0, np.nan])
    with np.errstate(over="ignore"):
        np.testing.assert_allclose(few.exp(powers), np.exp(powers), rtol=3e-16)
    assert few.log(np.float64(2.0)).shape == ()


def test_quantiles_are_those_of_scipy_and_one_for_plain_numbers_and_arrays():
    parts = np.concatenate(
        [[0.0, 5e-324, 1e-300, 0.5, np.nan], np.random.default_rng(0).uniform(0, 0.5, 500)]
    )
    found = few.quantile(parts)
    np.testing.assert_allclose(found, special.ndtri(parts), rtol=1e-14)
    np.testing.assert_array_equal(found[1:], [few.normal(part) for part in parts[1:].tolist()])
    with pytest.raises(ValueError, match="in the range"):  # and then arrays decide
        few.normal(0.0)
    many = np.full((2, 3), 0.1)
    np.testing.assert_allclose(few.quantile(many), special.ndtri(many), rtol=0)


def decided(n, seed, policy, rounds, unit, limited):
    """Loads, digests, fits and states of one run in which speeds jump, vanish and come back."""
    rng = np.random.default_rng(seed)
    batch = unit * n * int(rng.integers(1, 20))
    most = np.full(n, batch // 2 if limited and n > 2 else batch)
    least = np.full(n, 1 if limited else 0)
    balancer = Balancer(policies.create(policy, Cluster(n, batch, least, most)), quantum=unit)
    pace, overhead = 10 ** rng.uniform(-4, -1, n), 10 ** rng.uniform(-6, -2, n)
    scatter = rng.choice([0.0, 0.01, 0.1, 0.7])
    told = []
    for step in range(rounds):
        size = batch if rng.random() < 0.9 else int(rng.integers(1, batch + 1)) // unit * unit or unit
        loads = balancer.loads(step, size)
        pace = pace * np.where(rng.random(n) < 0.03, 4.0 ** rng.choice([-1, 1], n), 1.0)
        seconds = loads * pace * np.exp(scatter * rng.standard_normal(n)) + overhead
        if rng.random() < 0.04:
            seconds[rng.integers(n)] = rng.choice([np.nan, 0.0, 1e9])
        pieces = None
        if balancer.piece_plan(step) is not None and rng.random() < 0.9:
            times = rng.uniform(1e-5, 1e-2, (3, n))
            if rng.random() < 0.5:  # nothing was claimed
                times[1:] = 0.0
            if rng.random() < 0.1:  # somebody told nothing
                times[:, rng.integers(n)] = np.nan
            pieces = PieceTimes(*times)
        known = overhead * rng.uniform(0, 1, n)
        told.append(
            (balancer.digest, tuple(loads), *balancer.report(step, loads, seconds, known, None, None, pieces))
        )
    return told, balancer.state_dict()


@settings(deadline=None, max_examples=60)
@given(
    n=st.integers(1, few.FEW),
    seed=SEEDS,
    policy=st.sampled_from(["level", "auto", "factoring", "equal", "level:forecast=ema", "lbbsp"]),
    unit=st.sampled_from([1, 1, 4]),
    limited=st.booleans(),
)
def test_whole_runs_are_decided_alike(n, seed, policy, unit, limited):
    told, state = decided(n, seed, policy, 40, unit, limited)
    with arrays_only():
        by_arrays, other = decided(n, seed, policy, 40, unit, limited)
    for one, two in zip(told, by_arrays, strict=True):
        assert one[:2] == two[:2]
        same(one[2:], two[2:])
    assert repr(state) == repr(other)


@given(seed=SEEDS, n=st.integers(1, few.FEW))
def test_divisions_are_those_of_arrays(seed, n):
    rng = np.random.default_rng(seed)
    cost = Linear(10 ** rng.uniform(-6, 2, n), rng.choice([0.0, 1.0], n) * 10 ** rng.uniform(-6, 2, n))
    batch = int(rng.integers(1, 500))
    low = np.floor(rng.dirichlet(np.ones(n)) * batch * rng.choice([0.0, 0.5, 0.99]))
    high = np.minimum(low + np.ceil(rng.dirichlet(np.ones(n)) * batch * rng.uniform(1, 4)), batch)
    high[0] += max(batch - high.sum(), 0)
    found = water_level(cost, batch, low, high), whole_samples(cost, batch, low, high)
    with arrays_only():
        same(found, (water_level(cost, batch, low, high), whole_samples(cost, batch, low, high)))


@pytest.mark.parametrize("n", [1, 2, 16, 64])
def test_the_usual_round_needs_no_arrays(n, monkeypatch):
    """Else the two forms would agree because one is never used."""
    rng = np.random.default_rng(0)
    track, fit, errors = kalman.start((n,)), overheads.start((n,)), caution.start((n,))
    for _ in range(3):
        seconds, loads = rng.uniform(1, 2, n), rng.integers(10, 20, n).astype(float)
        expected, _, track = kalman.follow(track, seconds)
        fit = overheads.update(fit, loads, seconds)
        errors = caution.learn(errors, Linear(expected, np.zeros(n)), seconds, np.zeros(n))

    cost = Linear(expected, np.zeros(n))
    for module, name in ((kalman, "log"), (overheads, "log"), (caution, "log")):
        monkeypatch.setattr(module, name, None)
    monkeypatch.setattr(caution, "exp", None)
    monkeypatch.setattr(caution, "quantile", None)
    monkeypatch.setattr("paceline.shares.level.limits", None)
    monkeypatch.setattr("paceline.shares.whole.limits", None)
    kalman.follow(track, seconds)
    overheads.update(fit, loads, seconds)
    caution.cautious(cost, caution.learn(errors, cost, seconds, np.zeros(n)))
    water_level(cost, 16 * n, 0.0, 16.0 * n)
    whole_samples(cost, 16 * n)


PLANS = """
import sys
import numpy as np
from paceline import Cluster, policies
from paceline.balancer import Balancer
for n in (3, 12, 40):
    balancer, rng = Balancer(policies.create("auto", Cluster(n, 16 * n))), np.random.default_rng(0)
    for step in range(60):
        loads = balancer.loads(step, 16 * n)
        balancer.report(step, loads, loads * (0.5 + rng.random(n)) / 1000)
        print(balancer.digest)
assert "scipy" not in sys.modules, "a rank would load it for nothing"
"""


def test_unlike_processors_make_the_same_plans():
    """A rank whose plan differs in the last bit is refused by the others."""
    from numpy._core._multiarray_umath import __cpu_dispatch__, __cpu_features__

    lacks = " ".join(name for name in __cpu_dispatch__ if __cpu_features__.get(name))
    if not lacks:
        pytest.skip("this processor has nothing that could be left out")
    printed = {
        subprocess.run(
            [sys.executable, "-c", PLANS],
            env=dict(os.environ, NPY_DISABLE_CPU_FEATURES=names),
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for names in ("", lacks)
    }
    assert len(printed) == 1
