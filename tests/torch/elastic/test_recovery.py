"""The samples of a lost round: what is missing, how it is cut, and what each member knows of the running round."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.samples import CostModel
from paceline.torch.elastic.recovery import FRESH, MissingSamples, Running, missing, parts, parts_by_cost

SPANS = st.lists(st.tuples(st.integers(0, 30), st.integers(1, 12)), max_size=8)


@given(SPANS, st.integers(0, 20), st.integers(0, 20))
def test_missing_samples_are_those_in_no_span_in_as_few_spans_as_possible(
    ran: list[tuple[int, int]], first: int, size: int
) -> None:
    """By sets of samples; spans may overlap."""
    inside = [(start, count) for start, count in ran if first <= start and start + count <= first + size]
    there = {at for start, count in inside for at in range(start, start + count)}
    wanted = [at for at in range(first, first + size) if at not in there]
    found = missing(inside, first, size)
    assert [at for start, count in found for at in range(start, start + count)] == wanted
    assert all(start + count < after for (start, count), (after, _) in pairwise(found))


@pytest.mark.parametrize(
    ("spans", "members", "most", "options", "found"),
    [
        ([(0, 10)], 1, 100, {}, [(0, 5), (5, 5)]),
        ([(0, 10), (20, 6)], 2, 100, {}, [(0, 4), (4, 3), (7, 3), (20, 3), (23, 3)]),
        ([(0, 10), (20, 6)], 2, 3, {}, [(0, 3), (3, 3), (6, 2), (8, 2), (20, 3), (23, 3)]),
        ([(0, 9)], 1, 100, {}, [(0, 5), (5, 4)]),  # rounded up, so that there are no more than two
        ([(5, 1)], 8, 100, {}, [(5, 1)]),
        ([(5, 4)], 2, 100, {}, [(5, 1), (6, 1), (7, 1), (8, 1)]),
        ([(4, 16)], 1, 16, {"unit": 4}, [(4, 8), (12, 8)]),
        ([(4, 16)], 1, 7, {"unit": 4}, [(4, 4), (8, 4), (12, 4), (16, 4)]),
        ([(0, 3)], 1, 3, {"unit": 4}, [(0, 3)]),  # the end of an epoch is less than a unit
        ([(0, 7)], 4, 9, {"min_samples": 3}, [(0, 4), (4, 3)]),  # five at most, so that both have three
        ([(0, 6)], 4, 9, {"min_samples": 3}, [(0, 3), (3, 3)]),
        ([(0, 5)], 4, 9, {"min_samples": 3}, [(0, 5)]),
        ([], 4, 9, {}, []),
    ],
)
def test_spans_are_cut_into_two_parts_for_each_member(
    spans: list[tuple[int, int]],
    members: int,
    most: int,
    options: dict[str, int],
    found: list[tuple[int, int]],
) -> None:
    assert parts(spans, members, most, **options) == found


@pytest.mark.parametrize(
    ("lengths", "members", "most", "budget", "padded", "found"),
    [
        ([4, 4, 4, 4], 1, 9, np.inf, False, [2, 2]),
        ([4, 4, 4, 4], 2, 9, np.inf, False, [1, 1, 1, 1]),
        ([1, 1, 1, 1, 8], 1, 9, np.inf, False, [4, 1]),  # 4 and 8 are nearer to 6 each than any other cut
        ([8, 1, 1, 1, 1], 1, 9, np.inf, False, [1, 4]),
        ([3, 3, 4], 1, 9, np.inf, False, [2, 1]),  # 6 are 1 beyond the half of 10, and 3 are 2 short of it
        (
            [3, 5, 2],
            1,
            9,
            np.inf,
            False,
            [1, 1, 1],
        ),  # 8 are 3 beyond 5, and 3 are 2 short; 7 are 2 beyond, 5 are 5
        ([1, 1, 1, 1, 1, 1], 1, 2, np.inf, False, [2, 2, 2]),
        ([3, 3, 3, 3], 1, 9, 6.0, False, [2, 2]),
        ([3, 3, 3, 3], 1, 9, 5.9, False, [1, 1, 1, 1]),
        ([5, 4, 5, 4, 1, 1], 1, 9, np.inf, False, [2, 3, 1]),
        ([5, 4, 5, 4, 1, 1], 1, 9, np.inf, True, [2, 2, 2]),  # with padding, a third sample makes it 15
        ([5, 4, 5, 4, 1, 1], 1, 9, 9.9, True, [1, 1, 1, 2, 1]),
        ([2, 2, 2, 2, 2, 2], 1, 9, 6.0, True, [3, 3]),
    ],
)
def test_samples_that_cost_differently_are_cut_by_cost(
    lengths: list[float], members: int, most: int, budget: float, padded: bool, found: list[int]
) -> None:
    model = CostModel(1.0, padded=padded)
    cut = parts_by_cost([(7, len(lengths))], [np.array(lengths, float)], model, members, most, budget)
    assert [size for _, size in cut] == found
    assert [start for start, _ in cut] == [7 + sum(found[:number]) for number in range(len(found))]


def test_cuts_by_cost_begin_again_in_each_span_and_hold_min_samples() -> None:
    model, ones = CostModel(1.0), np.ones(3)
    assert parts_by_cost([(0, 3), (9, 3)], [ones, ones], model, 1, 9, np.inf) == [(0, 3), (9, 3)]
    assert parts_by_cost([(0, 3), (9, 3)], [ones, ones], model, 3, 9, np.inf, min_samples=2) == [
        (0, 3),
        (9, 3),
    ]
    squares = CostModel(0.0, 1.0)  # 9, 4, 4 and 1
    cut = parts_by_cost([(0, 4)], [np.array([3.0, 2.0, 2.0, 1.0])], squares, 1, 9, np.inf)
    assert cut == [(0, 1), (1, 3)]


def test_running_round_keeps_what_is_known_until_the_next_one() -> None:
    round = Running()
    assert (round.step, round.first, round.size, round.among, round.within, round.dropped) == (
        *(FRESH, 0, 0, ()),
        *(False, False),
    )
    assert FRESH == -1
    round.begin(4, 40, 8)
    round.enter((0, 2))
    assert (round.within, round.among) == (True, (0, 2))
    round.ran.append((40, 3))
    assert round.word() == {"done": 4, "ran": [(40, 3)], "within": True, "round": [40, 8, (0, 2)]}
    round.missing = MissingSamples([(43, 5)], 1, 9)
    round.enter((0,))
    assert round.among == (0, 2)  # it is recovered: it was divided among both
    round.begin(4, 40, 8)
    assert (round.ran, round.missing) == ([(40, 3)], MissingSamples([(43, 5)], 1, 9))
    round.over()
    assert (round.step, round.within, round.missing, round.ran) == (5, False, None, [])
    round.ran, round.missing = [(48, 1)], MissingSamples([], 1, 9)
    round.begin(6, 56, 8)
    assert (round.step, round.first, round.size, round.ran, round.missing) == (6, 56, 8, [], None)


def test_dropped_round_is_picked_up_once() -> None:
    round = Running(step=3, ran=[(0, 2)], within=True)
    assert not round.picks_up()
    round.drop()
    assert (round.within, round.ran, round.step) == (False, [], 3)
    assert round.picks_up()
    assert not round.picks_up()


def test_members_agree_on_the_samples_that_none_of_those_within_has_run() -> None:
    def word(ran: list[tuple[int, int]], within: bool) -> dict[str, object]:
        return {"done": 7, "ran": ran, "within": within, "round": [10, 6, [0, 1, 3]]}

    round = Running(step=6, missing=MissingSamples([(0, 1)], 1, 1))
    round.agree([word([(99, 1)], False), word([(12, 2)], True), word([(10, 1)], True)], 3, 5)
    assert (round.step, round.first, round.size, round.among) == (7, 10, 6, (0, 1, 3))
    assert round.missing == MissingSamples([(11, 1), (14, 2)], 3, 5)
    round.agree([word([], False)], 2, 5)
    assert (round.step, round.missing) == (7, None)
