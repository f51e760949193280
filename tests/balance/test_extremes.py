"""Reports that no clock gives: whatever seconds come, every policy divides the whole batch within the limits."""

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from paceline import policies
from paceline.balancer import Balancer
from paceline.costs import Linear
from paceline.errors import PacelineError
from paceline.rounds import Cluster, Round
from paceline.shares import water_level

GUARANTEES = (
    "Seconds from 1e-300 to 1e300, in any mixture, divide the whole "
    "batch within the limits under every policy.",
)

SECONDS = st.one_of(
    st.sampled_from([1e-300, 1e-15, 1e-9, 1.0, 1e9, 1e15, 1e300]),
    st.floats(-300.0, 300.0).map(lambda power: 10.0**power),
)
ROUNDS = st.integers(1, 4).flatmap(
    lambda n: st.lists(
        st.lists(
            st.tuples(SECONDS, st.sampled_from([0.0, 0.0, 0.5, 1 - 1e-12, 1.0])), min_size=n, max_size=n
        ),
        min_size=1,
        max_size=6,
    )
)
# What made shares of lbbsp-gpu all zero: an overhead beside which the others' work is nothing.
ZEROED = [[(1.0, 0.0), (1.0, 0.0)], [(1e-9, 0.0), (1e9, 1.0)], [(1e9, 1.0), (1e-9, 1.0)]]
# Between neighbouring floats of the level, the late ones' loads differ by 128 samples; what is left of the batch then
# must not go to the slow one, whom a hundred-millionth of a sample takes long.
SLOW_AND_LATE = [(2989135587185895.0, 0.0), (4.488947797397652e17, 0.0), *2 * [(1.0, 8.686633072560148e17)]]


def check(shares: np.ndarray, cluster: Cluster) -> None:
    assert np.isfinite(shares).all(), shares
    assert abs(shares.sum() - 1.0) < 1e-9, shares
    assert (shares >= cluster.least_shares - 1e-9).all(), shares
    assert (shares <= cluster.most_shares + 1e-9).all(), shares


@pytest.mark.parametrize("name", policies.names())
@settings(max_examples=25)
@given(rounds=ROUNDS, limited=st.booleans())
@example(rounds=ZEROED, limited=False)
def test_every_policy_divides_the_batch(
    name: str, rounds: list[list[tuple[float, float]]], limited: bool
) -> None:
    n = len(rounds[0])
    least, most = (np.full(n, 2.0), np.full(n, 60.0)) if limited else (None, None)
    cluster = Cluster(n, 60, least, most)
    policy = policies.create(name, cluster)
    plan, state = policy.init()
    for reports in rounds:
        seconds = np.array([each for each, _ in reports])
        overhead = seconds * [part for _, part in reports]
        happened = Round(
            plan.shares, seconds, 60, overhead=overhead, costs=Linear(seconds / 20, overhead),
            upcoming=Linear(seconds / 20, overhead),
        )  # fmt: skip
        plan, state = policy.step(state, happened)
        check(plan.shares, cluster)


@pytest.mark.parametrize("name", policies.names())
@settings(max_examples=25)
@given(rounds=ROUNDS, absent=st.integers(0, 10))
def test_every_loop_gives_whole_samples(
    name: str, rounds: list[list[tuple[float, float]]], absent: int
) -> None:
    n = len(rounds[0])
    try:
        balancer = Balancer(policies.create(name, Cluster(n, 60)))
    except PacelineError:
        return  # for simulations alone
    for step, reports in enumerate(rounds):
        loads = balancer.loads(step, 60)
        assert loads.sum() == 60
        assert loads.min() >= 0
        seconds = np.array([each for each, _ in reports])
        overhead = seconds * [part for _, part in reports]
        if n > 1 and absent < n and step % 2:
            seconds[absent] = np.nan
            overhead[absent] = 0.0
        fitted, shares = balancer.report(step, loads, seconds, overhead)
        assert np.isfinite(fitted).all()
        assert abs(shares.sum() - 1.0) < 1e-6
    assert balancer.loads(len(rounds), 60).sum() == 60


@given(
    costs=st.lists(st.tuples(st.floats(1e-18, 1e18), st.floats(0.0, 1e18)), min_size=1, max_size=5),
    batch=st.floats(1e-3, 1e9),
)
@example(costs=[(1e-12, 1e12), (1e3, 1e12)], batch=60.0)
@example(costs=[(np.inf, 0.0), (1.0, 1e18)], batch=60.0)
@example(costs=[(1.0, 580921.0), (1.0, 580923.0), (1.2425875378536808e16, 0.0)], batch=1.0)
@example(costs=SLOW_AND_LATE, batch=216718962.79)
@example(costs=[*SLOW_AND_LATE, SLOW_AND_LATE[0]], batch=216718962.79136962)
def test_water_level_is_full_and_optimal(costs: list[tuple[float, float]], batch: float) -> None:
    """Whoever has work ends when the level says, but for what rounding takes from sums of unlike size."""
    slope, overhead = (np.array(column) for column in zip(*costs, strict=True))
    level, loads = water_level(Linear(slope, overhead), batch)
    assert abs(loads.sum() - batch) <= 1e-9 * batch
    assert (loads >= 0).all()
    busy = (loads > 0) & np.isfinite(slope)
    ends = overhead[busy] + slope[busy] * loads[busy]
    assert (ends <= level * (1 + 1e-9) + 1e-15 * batch).all()
