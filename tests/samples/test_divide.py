"""Samples to uneven workers: the bound of the rule, brute force on small rounds, HiGHS on larger ones."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import Bounds, LinearConstraint, milp

from paceline import PacelineError
from paceline.samples.divide import _Ends, bound, limited, longest_first, lower_bound

GUARANTEES = (
    "A round of unpadded samples without overheads and limits ends within 2n / (n + 1) of the best division.",
)


def makespan(who: np.ndarray, costs: np.ndarray, pace: np.ndarray) -> float:
    return float((np.bincount(who, costs, len(pace)) * pace).max())


def plain(costs: np.ndarray, pace: np.ndarray) -> np.ndarray:
    """The rule, one sample after another."""
    ends, who = np.zeros(len(pace)), np.empty(len(costs), int)
    for sample in np.argsort(-costs, kind="stable"):
        after = ends + costs[sample] * pace
        who[sample] = np.argmin(after)
        ends[who[sample]] = after.min()
    return who


@settings(max_examples=60, deadline=None)
@given(
    costs=st.lists(st.floats(0.01, 100), min_size=1, max_size=7),
    pace=st.lists(st.floats(0.2, 5), min_size=1, max_size=3),
)
def test_small_rounds_end_within_the_bound_of_the_best_division(costs: list, pace: list) -> None:
    c, p = np.array(costs), np.array(pace)
    best = min(makespan(np.array(each), c, p) for each in product(range(len(p)), repeat=len(c)))
    found = makespan(longest_first(c, p), c, p)
    assert lower_bound(c, p) <= best * (1 + 1e-12)
    assert best <= found * (1 + 1e-12) <= bound(len(p)) * best * (1 + 1e-9)


@settings(max_examples=40, deadline=None)
@given(data=st.data(), batch=st.integers(500, 3000), workers=st.integers(1, 40), seed=st.integers(0, 999))
def test_many_samples_in_blocks_are_as_good_as_one_by_one(
    data: object, batch: int, workers: int, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    costs = np.exp(data.draw(st.sampled_from([0.0, 1.0, 3.0])) * rng.standard_normal(batch))  # type: ignore[attr-defined]
    pace = rng.uniform(0.2, 4, workers)
    found, reference = (makespan(way(costs, pace), costs, pace) for way in (longest_first, plain))
    assert found <= bound(workers) * lower_bound(costs, pace) * (1 + 1e-9)
    assert found <= 1.02 * reference


@settings(max_examples=40, deadline=None)
@given(batch=st.integers(0, 1500), workers=st.integers(1, 20), seed=st.integers(0, 999))
def test_limits_of_many_samples_hold(batch: int, workers: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    costs, pace = rng.lognormal(0, 1, batch), rng.uniform(0.2, 4, workers)
    most = rng.integers(0, 2 * batch // workers + 1, workers)
    most[0] += max(batch - most.sum(), 0)
    least = rng.integers(0, batch // (2 * workers) + 1, workers)
    least = np.minimum(least, most)
    counts = np.bincount(
        longest_first(costs, pace, rng.uniform(0, 2, workers), least, most), minlength=workers
    )
    assert counts.sum() == batch
    assert np.all(counts <= most)
    assert np.all(counts >= least)


def test_mid_size_rounds_are_near_what_highs_finds() -> None:
    """Integer programming: x[s, w] in {0, 1}, each sample once, all ends at most T, T least."""
    for seed in range(3):
        rng = np.random.default_rng(seed)
        samples, workers = 18, 3
        costs, pace = np.clip(rng.lognormal(5, 1, samples), 16, 1024), np.array([1.0, 1.0, 3.0])
        size = samples * workers
        once = np.zeros((samples, size + 1))
        ends = np.zeros((workers, size + 1))
        for sample, worker in product(range(samples), range(workers)):
            once[sample, sample * workers + worker] = 1
            ends[worker, sample * workers + worker] = costs[sample] * pace[worker]
        ends[:, -1] = -1
        solved = milp(
            np.r_[np.zeros(size), 1],
            integrality=np.r_[np.ones(size), 0],
            bounds=Bounds(0, np.r_[np.ones(size), np.inf]),
            constraints=[LinearConstraint(once, 1, 1), LinearConstraint(ends, -np.inf, 0)],
            options={"time_limit": 5, "mip_rel_gap": 0.002},
        )
        found = makespan(longest_first(costs, pace), costs, pace)
        assert solved.fun / 1.003 <= found <= 1.05 * solved.fun


def test_equal_samples_go_in_order_and_ties_to_the_lowest_worker() -> None:
    assert longest_first(np.ones(6), np.ones(3)).tolist() == [0, 1, 2, 0, 1, 2]


def test_limits_that_cannot_hold_the_samples_raise() -> None:
    with pytest.raises(PacelineError, match="hold 3 of the round's 4 samples"):
        longest_first(np.ones(4), np.ones(2), most=np.array([1, 2]))
    with pytest.raises(PacelineError, match="hold 0 of the round's 4 samples"):
        longest_first(np.ones(4), np.full(2, np.inf))


def test_two_thousand_samples_are_dealt_one_by_one() -> None:
    rng = np.random.default_rng(0)
    for batch in (1, 100, 2048):
        costs, pace = rng.lognormal(0, 1, batch), rng.uniform(0.2, 4, 7)
        np.testing.assert_array_equal(longest_first(costs, pace), plain(costs, pace))


def test_last_samples_go_to_workers_that_are_owed_their_least() -> None:
    assert longest_first(np.ones(4), np.array([1.0, 100.0]), least=np.array([0, 2])).tolist() == [0, 0, 1, 1]
    assert longest_first(np.ones(2), np.array([1.0, 10.0]), least=np.array([1, 1])).tolist() == [0, 1]
    # It has had its least by the rule: the rest follows the rule.
    assert longest_first(np.ones(4), np.array([1.0, 1.5]), least=np.array([0, 1])).tolist() == [0, 1, 0, 0]


def test_least_loads_shrink_to_a_short_round_in_whole_samples() -> None:
    least, most = limited(5, np.ones(3), np.array([3, 3, 3]), None)
    assert (least.tolist(), most.tolist()) == ([1, 1, 1], [5, 5, 5])
    assert least.dtype == np.int64
    least, most = limited(9, np.array([1.0, np.inf, 1.0]), np.array([3, 3, 12]), np.array([4, 9, 12]))
    assert (least.tolist(), most.tolist()) == ([2, 0, 6], [4, 0, 9])


def test_block_spreads_each_workers_samples_over_its_lengths() -> None:
    """Six for the quick worker at 1/12, 3/12, ... of the block, and two for the other at 1/4 and 3/4."""
    ends, chosen = _Ends(np.array([1.0, 3.0]), np.zeros(2), np.array([99, 99])), np.empty(8, np.int64)
    ends.block(np.ones(8), chosen)
    assert chosen.tolist() == [0, 0, 1, 0, 0, 0, 1, 0]
    assert ends.ends.tolist() == [6.0, 6.0]
    assert ends.room.tolist() == [93, 97]
