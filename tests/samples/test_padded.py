"""Runs of padded samples: the best cuts, and the soonest end of all runs in order, beside brute force."""

from __future__ import annotations

from itertools import combinations, pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.samples import CostModel, Room, deal

GUARANTEES = ("Padded samples are cut at the lowest cost, and two workers' parts end as early as possible.",)


def cost(ordered: np.ndarray, cuts: tuple[int, ...], launch: float) -> float:
    return sum(launch + (stop - start) * ordered[start] for start, stop in pairwise((*cuts, len(ordered))))


def cheapest(ordered: np.ndarray, launch: float, most: int) -> float:
    """Of all cuts of a run into micro-batches of at most so many samples."""
    if not len(ordered):
        return 0.0
    inner = range(1, len(ordered))
    ways = [(0, *cuts) for count in range(len(ordered)) for cuts in combinations(inner, count)]
    fits = [cuts for cuts in ways if max(b - a for a, b in pairwise((*cuts, len(ordered)))) <= most]
    return min(cost(ordered, cuts, launch) for cuts in fits)


@settings(max_examples=80, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 50), min_size=1, max_size=9),
    launch=st.floats(0, 30),
    most=st.integers(1, 9),
)
def test_one_workers_run_is_cut_as_cheaply_as_can_be(lengths: list, launch: float, most: int) -> None:
    ordered = np.sort(np.array(lengths, float))[::-1]
    dealt = deal(
        np.array(lengths, float), CostModel(1.0, 0.0, launch, True), np.ones(1), room=Room(micro_batch=most)
    )
    assert dealt.costs[0] <= cheapest(ordered, launch, most) * (1 + 1e-9)


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 50), min_size=2, max_size=9),
    launch=st.floats(0, 30),
    slow=st.sampled_from([1.0, 1.7, 4.0]),
)
def test_two_workers_end_as_soon_as_two_runs_can(lengths: list, launch: float, slow: float) -> None:
    ordered = np.sort(np.array(lengths, float))[::-1]
    pace = np.array([1.0, slow])
    dealt = deal(np.array(lengths, float), CostModel(1.0, 0.0, launch, True), pace)
    ends = [
        max(
            pace[first] * cheapest(ordered[:at], launch, 9),
            pace[1 - first] * cheapest(ordered[at:], launch, 9),
        )
        for at in range(len(ordered) + 1)
        for first in (0, 1)
    ]
    assert (dealt.costs * pace).max() <= min(ends) * 1.002 + 1e-9


def test_a_large_round_is_near_the_bound() -> None:
    """More places for cuts than are looked at: still nearly all of the bound, for uneven workers."""
    rng = np.random.default_rng(0)
    lengths = np.clip(rng.lognormal(5, 1, 5000), 16, 1024)
    pace = rng.uniform(1, 4, 6)
    model = CostModel(1 / lengths.mean(), 0.0, 2.0, True)
    dealt = deal(lengths, model, pace)
    assert (dealt.costs * pace).max() < 1.1 * (model.of(lengths).sum() / (1 / pace).sum())


@pytest.mark.parametrize("slow", [np.inf, 50.0])
def test_runs_leave_later_workers_their_least_and_those_away_nothing(slow: float) -> None:
    lengths, pace = np.ones(8), np.array([1.0, 1.0, slow])
    for least in ([0, 0, 6], [0, 4, 2], [1, 2, 3]):
        dealt = deal(lengths, CostModel(1.0, launch=0.1, padded=True), pace, room=Room(least=least))
        wanted = np.where(np.isfinite(pace), least, 0)
        assert dealt.loads.sum() == 8
        assert (dealt.loads >= wanted).all(), least
        assert dealt.loads[2] == wanted[2]  # a worker so slow gets no more


@pytest.mark.parametrize("unit", [2.0**-30, 2.0**30])
def test_runs_do_not_depend_on_the_unit_of_time(unit: float) -> None:
    rng = np.random.default_rng(0)
    lengths, pace = rng.lognormal(3, 1, 300), rng.uniform(1, 4, 4)
    model = CostModel(1 / lengths.mean(), launch=0.5, padded=True)
    one, other = deal(lengths, model, pace), deal(lengths, model, pace * unit)
    assert one.order.tolist() == other.order.tolist()
    assert [each.tolist() for each in one.sizes] == [each.tolist() for each in other.sizes]


def test_single_worker_beside_those_away_runs_everything() -> None:
    dealt = deal(np.ones(8), CostModel(1.0, launch=0.1, padded=True), np.array([1.0, np.inf]))
    assert dealt.loads.tolist() == [8, 0]
