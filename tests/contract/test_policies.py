"""What every registered policy must do; a new one is found here by its name alone."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline import Cluster, Machines, Plan, Round, policies
from paceline.costs import Linear
from paceline.rounds import Array
from paceline.shares import water_level, whole_samples

VARIANTS = [
    "abs:reading=share",
    "dolbie:alpha=0.001",
    "factoring:scheme=guided",
    "dolbie:monotone=no",
    "dolbie:tight=yes",
    "lbbsp:reading=strict,rounds=2",
    "level:forecast=last",
    "wlbs:micro=4,period=2,epoch=7",
]
pytestmark = pytest.mark.parametrize("name", policies.names() + VARIANTS)

BATCH = 480


class Stream:
    """Linear costs that drift; the same seed gives the same rounds, whatever is asked of them."""

    def __init__(
        self, seed: int, shape: tuple[int, ...], rounds: int, overhead: float = 0.02, drift: float = 0.1
    ):
        rng = np.random.default_rng(seed)
        self.slopes = rng.uniform(0.5e-3, 4e-3, shape) * np.exp(drift * rng.standard_normal((rounds, *shape)))
        self.overheads = np.broadcast_to(overhead * rng.uniform(0, 1, shape), (rounds, *shape))
        self.cpu = rng.uniform(0.2, 1, (rounds, *shape))

    def of(self, index: Any) -> Stream:
        """That of some workers or of one realization."""
        part = copy.copy(self)
        part.slopes, part.overheads, part.cpu = (
            each[(slice(None), *index)] for each in (self.slopes, self.overheads, self.cpu)
        )
        return part

    def costs(self, t: int) -> Linear:
        return Linear(self.slopes[t], self.overheads[t])

    def round(self, t: int, shares: Array, absent: Array | None = None, batch: int = BATCH) -> Round:
        seconds, overhead = self.costs(t).seconds(shares * batch), self.overheads[t].copy()
        if absent is not None:  # whoever is away reports nothing of anything
            seconds, overhead = np.where(absent, np.nan, seconds), np.where(absent, np.nan, overhead)
        coming = self.costs(min(t + 1, len(self.slopes) - 1))
        cpu = self.cpu[t]
        return Round(shares, seconds, batch, overhead, upcoming=coming, cpu=cpu, memory=cpu)


def cluster(workers: int, realizations: tuple[int, ...] = (), **limits: Any) -> Cluster:
    sizes = Machines(np.arange(1.0, workers + 1), np.full(workers, 8.0), np.full(workers, 64.0))
    return Cluster(workers, BATCH, machines=sizes, realizations=realizations, **limits)


def run(
    policy: Any, stream: Stream, start: int, stop: int, plan: Plan, state: Any
) -> tuple[list[Array], Plan, Any]:
    played = []
    for t in range(start, stop):
        played.append(plan.shares)
        plan, state = policy.step(state, stream.round(t, plan.shares))
    return played, plan, state


@st.composite
def limits(draw: st.DrawFn, workers: int) -> dict[str, Array]:
    """Limits that hold the batch, some of them binding."""
    least = np.array(
        draw(st.lists(st.integers(0, BATCH // workers), min_size=workers, max_size=workers)), float
    )
    extra = np.array(draw(st.lists(st.integers(0, BATCH), min_size=workers, max_size=workers)), float)
    most = np.minimum(least + extra, BATCH)
    while most.sum() < BATCH:
        most = np.minimum(most + 10, BATCH)
    return {"least": least, "most": most}


@settings(max_examples=15, deadline=None)
@given(data=st.data(), workers=st.integers(1, 7), seed=st.integers(0, 2**32 - 1))
def test_shares_are_feasible_and_whole_samples_exact(name: str, data: Any, workers: int, seed: int) -> None:
    bounds = data.draw(limits(workers))
    c = cluster(workers, **bounds)
    policy, stream = policies.create(name, c), Stream(seed, (workers,), 12)
    plan, state = policy.init()
    for t in range(12):
        assert plan.shares.shape == c.shape
        assert plan.shares.min() >= 0
        assert plan.shares.sum() == pytest.approx(1, abs=1e-9)
        assert np.all(plan.shares >= c.least_shares - 1e-9)
        assert np.all(plan.shares <= c.most_shares + 1e-9)
        loads = whole_samples(plan, BATCH, c.least, c.most)
        assert loads.sum() == BATCH
        assert np.all(loads >= c.least)
        assert np.all(loads <= c.most)
        short = data.draw(st.integers(0, BATCH), label="a short batch")
        assert whole_samples(plan, short, c.least, c.most).sum() == short
        plan, state = policy.step(state, stream.round(t, loads / BATCH))


@settings(max_examples=10, deadline=None)
@given(workers=st.integers(1, 6), seed=st.integers(0, 2**32 - 1))
def test_step_changes_no_argument_and_repeats_itself(name: str, workers: int, seed: int) -> None:
    policy, stream = policies.create(name, cluster(workers)), Stream(seed, (workers,), 6)
    plan, state = policy.init()
    _, plan, state = run(policy, stream, 0, 5, plan, state)
    seen = stream.round(5, plan.shares)
    state_before, seen_before = copy.deepcopy(state), copy.deepcopy(seen)
    first, after = policy.step(state, seen)
    again, after_again = policy.step(state, seen)
    assert same(policies.leaves(state), policies.leaves(state_before))
    for field in ("shares", "seconds", "overhead", "present"):
        np.testing.assert_array_equal(getattr(seen, field), getattr(seen_before, field))
    assert policies.digest(first) == policies.digest(again)
    assert same(policies.leaves(after), policies.leaves(after_again))


def same(left: list[Any], right: list[Any]) -> bool:
    return len(left) == len(right) and all(
        np.array_equal(a, b, equal_nan=True) for a, b in zip(left, right, strict=True)
    )


@settings(max_examples=10, deadline=None)
@given(workers=st.integers(1, 6), seed=st.integers(0, 2**32 - 1))
def test_ten_rounds_saved_and_loaded_and_ten_more_are_twenty(name: str, workers: int, seed: int) -> None:
    stream = Stream(seed, (workers,), 20)
    policy = policies.create(name, cluster(workers))
    straight, _, _ = run(policy, stream, 0, 20, *policy.init())
    _, plan, state = run(policy, stream, 0, 10, *policy.init())
    stored = [
        np.frombuffer(leaf.tobytes(), leaf.dtype).reshape(leaf.shape) for leaf in policies.leaves(state)
    ]
    fresh = policies.create(name, cluster(workers))
    resumed, _, _ = run(fresh, stream, 10, 20, plan, policies.restore(fresh.init()[1], stored))
    np.testing.assert_array_equal(resumed, straight[10:])


@settings(max_examples=10, deadline=None)
@given(workers=st.integers(2, 6), seed=st.integers(0, 2**32 - 1), data=st.data())
def test_relabelled_workers_get_relabelled_shares(name: str, workers: int, seed: int, data: Any) -> None:
    order = np.array(data.draw(st.permutations(range(workers))))
    stream = Stream(seed, (workers,), 12)
    there = cluster(workers)
    sizes = Machines(there.machines.cpus[order], there.machines.cores[order], there.machines.memory[order])
    here = Cluster(workers, BATCH, machines=sizes)
    policy, twin = policies.create(name, there), policies.create(name, here)
    played, _, _ = run(policy, stream, 0, 12, *policy.init())
    mirrored, _, _ = run(twin, stream.of((order,)), 0, 12, *twin.init())
    np.testing.assert_allclose(np.array(mirrored), np.array(played)[:, order], atol=1e-9)


@settings(max_examples=8, deadline=None)
@given(workers=st.integers(1, 5), seed=st.integers(0, 2**32 - 1), shape=st.sampled_from([(3,), (2, 2)]))
def test_realizations_together_are_realizations_one_by_one(
    name: str, workers: int, seed: int, shape: tuple[int, ...]
) -> None:
    stream = Stream(seed, (*shape, workers), 12)
    policy = policies.create(name, cluster(workers, shape))
    together, _, _ = run(policy, stream, 0, 12, *policy.init())
    single = policies.create(name, cluster(workers))
    for index in np.ndindex(shape):
        played, _, _ = run(single, stream.of(index), 0, 12, *single.init())
        np.testing.assert_allclose(played, np.array(together)[(slice(None), *index)], atol=1e-12)


@settings(max_examples=20, deadline=None)
@given(workers=st.integers(2, 5), seed=st.integers(0, 2**32 - 1))
def test_no_realization_feels_what_happens_to_another(name: str, workers: int, seed: int) -> None:
    """Also where seconds are absurd, or lost, by which a share that is off in its last bit may become another one. So
    policies that keep shares alone agree to the last bit, and those that forecast within rounding."""
    rng, shape = np.random.default_rng(seed), (3, workers)
    stream = Stream(seed, shape, 8)
    odd = rng.choice([1.0, np.inf, 1e300, 0.0, np.nan], (8, *shape), p=[0.7, 0.1, 0.1, 0.05, 0.05])

    def played(index: Any, c: Cluster) -> Array:
        policy, alone = policies.create(name, c), stream.of(index)
        plan, state = policy.init()
        found = []
        for t in range(8):
            found.append(np.broadcast_to(plan.shares, c.shape))
            seen, strange = alone.round(t, plan.shares), odd[(t, *index)]
            seconds = np.where(strange == 1.0, seen.seconds, strange)
            overhead = np.where(np.isnan(strange), np.nan, seen.overhead)
            plan, state = policy.step(
                state, dataclasses.replace(seen, seconds=seconds, overhead=overhead, present=None)
            )
        return np.array(found)

    together = played((), cluster(workers, (3,)))
    rounding = 0.0 if name.split(":")[0] in ("abs", "dolbie", "lbbsp", "ogd", "wlbs") else 1e-12
    for index in range(3):
        alone = played((index,), cluster(workers))
        np.testing.assert_allclose(alone, together[:, index], rtol=0, atol=rounding)


@settings(max_examples=10, deadline=None)
@given(workers=st.integers(2, 6), seed=st.integers(0, 2**32 - 1), data=st.data())
def test_a_worker_absent_for_a_round_does_no_harm(name: str, workers: int, seed: int, data: Any) -> None:
    gone = data.draw(st.integers(0, workers - 1))
    stream = Stream(seed, (workers,), 40, drift=0.0)
    policy = policies.create(name, cluster(workers))
    _, plan, state = run(policy, stream, 0, 10, *policy.init())
    mask = np.arange(workers) == gone
    before = plan.shares
    plan, state = policy.step(state, stream.round(10, plan.shares, absent=mask))
    assert plan.shares[gone] == pytest.approx(0, abs=1e-12)  # others carry its part...
    assert plan.shares.sum() == pytest.approx(1)
    assert whole_samples(plan, BATCH)[gone] == 0
    plan, state = policy.step(state, stream.round(11, plan.shares))
    undisturbed, _, _ = run(policy, stream, 0, 12, *policy.init())
    assert plan.shares[gone] > 0.5 * min(before[gone], undisturbed[-1][gone])  # ...until it is back
    assert np.isfinite(plan.shares).all()


@settings(max_examples=10, deadline=None)
@given(workers=st.integers(2, 6), seed=st.integers(0, 2**32 - 1), data=st.data())
def test_lost_report_costs_no_worker_its_share(name: str, workers: int, seed: int, data: Any) -> None:
    """Present, but without seconds: the worker ran, only its measurement did not arrive."""
    silent = np.arange(workers) == data.draw(st.integers(0, workers - 1))
    stream = Stream(seed, (workers,), 12, drift=0.0)
    policy = policies.create(name, cluster(workers))
    _, plan, state = run(policy, stream, 0, 10, *policy.init())
    undisturbed = policy.step(state, stream.round(10, plan.shares))[0].shares
    heard = stream.round(10, plan.shares)
    lost = dataclasses.replace(heard, seconds=np.where(silent, np.nan, heard.seconds))
    plan, state = policy.step(state, lost)
    assert plan.shares.sum() == pytest.approx(1)
    assert plan.shares[silent] >= 0.8 * min(undisturbed[silent], lost.shares[silent])
    run(policy, stream, 11, 12, plan, state)


@settings(max_examples=10, deadline=None)
@given(workers=st.integers(2, 6), seed=st.integers(0, 2**32 - 1), data=st.data())
def test_a_dead_worker_leaves_its_share_to_the_others(name: str, workers: int, seed: int, data: Any) -> None:
    gone = np.arange(workers) == data.draw(st.integers(0, workers - 1))
    stream = Stream(seed, (workers,), 30)
    policy = policies.create(name, cluster(workers))
    _, plan, state = run(policy, stream, 0, 5, *policy.init())
    for t in range(5, 30):
        plan, state = policy.step(state, stream.round(t, plan.shares, absent=gone))
        assert plan.shares[gone] == pytest.approx(0, abs=1e-12)
        assert plan.shares.sum() == pytest.approx(1)
        assert np.isfinite(plan.shares).all()


@settings(max_examples=10, deadline=None)
@given(workers=st.integers(1, 6), seed=st.integers(0, 2**32 - 1))
def test_round_without_reports_changes_nothing(name: str, workers: int, seed: int) -> None:
    stream = Stream(seed, (workers,), 12)
    policy = policies.create(name, cluster(workers))
    _, plan, state = run(policy, stream, 0, 5, *policy.init())
    plan, state = policy.step(state, stream.round(5, plan.shares, absent=np.ones(workers, bool)))
    assert plan.shares.sum() == pytest.approx(1)
    _, plan, state = run(policy, stream, 6, 12, plan, state)
    assert plan.shares.sum() == pytest.approx(1)


@settings(max_examples=10, deadline=None)
@given(workers=st.integers(1, 6), seed=st.integers(0, 2**32 - 1))
def test_constant_costs_are_a_fixed_point_at_their_optimum(name: str, workers: int, seed: int) -> None:
    """Whoever aims at the optimum stays there; it is reached by rounds whose seconds are all equal."""
    rng = np.random.default_rng(seed)
    costs = Linear(rng.uniform(1e-3, 4e-3, workers), np.zeros(workers))
    best = water_level(costs, BATCH).loads / BATCH
    policy = policies.create(name, cluster(workers))
    plan, state = policy.init()
    for _ in range(5):
        plan, state = policy.step(state, Round(best, costs.seconds(best * BATCH), BATCH, upcoming=costs))
        if hasattr(state, "shares"):
            state = state._replace(shares=best.copy())
        elif hasattr(state, "loads"):
            state = state._replace(loads=best * BATCH)
    if policy.settles:
        np.testing.assert_allclose(plan.shares, best, atol=1e-9)


def test_equal_workers_keep_equal_shares(name: str) -> None:
    policy = policies.create(name, Cluster(5, BATCH))
    plan, state = policy.init()
    costs = Linear(np.full(5, 1e-3), np.full(5, 0.01))
    for _ in range(20):
        np.testing.assert_allclose(plan.shares, 0.2, atol=5 / BATCH)
        seconds = costs.seconds(plan.shares * BATCH)
        plan, state = policy.step(state, Round(plan.shares, seconds, BATCH, costs.overhead, upcoming=costs))


def test_has_a_line_to_describe_it(name: str) -> None:
    assert 10 < len(policies.describe(name.partition(":")[0])) < 110
