import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline import PacelineError
from paceline.coded import plan, random_problem
from paceline.coded.layout import block_counts, layout, relayout


@settings(max_examples=40, deadline=None)
@given(st.integers(2, 12), st.integers(1, 3000), st.integers(0, 99))
def test_blocks_follow_the_loads_and_suffice(workers, rows, seed):
    made = plan(random_problem(1, workers, rows, np.random.default_rng(seed)))
    found = layout(made, 0)
    held = [block for owned in found.owned for block in owned]
    assert sorted(held) == list(range(found.code.n))
    assert found.size * found.code.k >= rows > found.size * (found.code.k - 1)
    assert found.enough(range(workers))
    counts = np.array([len(owned) for owned in found.owned])
    share = made.loads[0] / found.size * found.code.n / (made.loads[0] / found.size).sum()
    assert np.abs(counts - share).max() <= 1


def test_uncoded_plan_has_no_parity():
    made = plan(random_problem(1, 5, 100, np.random.default_rng(0)), "uniform", coded=False)
    found = layout(made, 0, blocks=20)
    assert found.code.n == found.code.k == 20
    assert not found.enough([0, 1, 2, 3])


def test_enough_is_any_k_of_n():
    made = plan(random_problem(1, 6, 600, np.random.default_rng(1)))
    found = layout(made, 0)
    for gone in range(6):
        others = [n for n in range(6) if n != gone]
        assert found.enough(others) == (sum(len(found.owned[n]) for n in others) >= found.code.k)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 999))
def test_a_new_layout_moves_only_what_changes(seed):
    rng = np.random.default_rng(seed)
    made = plan(random_problem(1, 6, 900, rng))
    old = layout(made, 0)
    loads = made.loads[0] * rng.uniform(0.3, 2, 6)
    loads[rng.integers(6)] = 0
    loads *= max(1.4 * 900 / loads.sum(), 1)
    new, moves = relayout(old, loads)
    held = [block for owned in new.owned for block in owned]
    assert len(set(held)) == len(held)
    for n in range(6):
        assert set(new.owned[n]) == set(old.owned[n]) - set(moves.drop[n]) | set(moves.place[n])
        assert not (moves.drop[n] and moves.place[n])
    assert new.enough(range(6))
    again, nothing = relayout(new, loads)
    assert again == new
    assert not any(nothing.place)
    assert not any(nothing.drop)


def test_bad_requests_are_refused():
    made = plan(random_problem(1, 3, 100, np.random.default_rng(0)))
    with pytest.raises(PacelineError, match="cannot cover"):
        layout(dataclasses.replace(made, loads=made.loads * 0.5), 0)
    with pytest.raises(PacelineError, match="blocks=0: expected a whole number, 1 to"):
        layout(made, 0, blocks=0)
    with pytest.raises(PacelineError, match="not in the plan"):
        layout(made, 5)


@pytest.mark.parametrize(
    ("loads", "rows", "k", "survive", "counts"),
    [
        ([10, 10], 20, 4, 0, [2, 2]),
        ([15, 10, 5], 20, 4, 0, [3, 2, 1]),  # half as many again as the rows: six blocks
        ([10, 10, 10], 20, 3, 0, [2, 2, 1]),  # 4.5, rounded up; of equal remainders the first ones
        ([5, 5], 20, 4, 0, [2, 2]),  # never fewer than k
        ([1, 0, 3], 4, 4, 0, [1, 0, 3]),
        ([10, 10, 0], 20, 4, 1, [4, 4, 0]),  # whoever has no load gets no block
        ([10, 10, 10], 20, 4, 1, [2, 2, 2]),
        ([30, 10, 10], 25, 4, 1, [5, 2, 2]),
        ([10, 10, 0], 20, 4, 2, [2, 2, 0]),  # both may not be lost
    ],
)
def test_blocks_of_each_worker_by_hand(loads, rows, k, survive, counts):
    assert block_counts(np.array(loads, float), rows, k, survive).tolist() == counts


@given(st.lists(st.integers(0, 30), min_size=3, max_size=6), st.integers(1, 12), st.integers(0, 2))
def test_any_lost_workers_leave_enough_blocks(loads, k, survive):
    loads = np.array(loads, float)
    if not loads.any():
        return
    counts = block_counts(loads, int(loads.sum()), k, survive)
    assert (counts[loads == 0] == 0).all()
    if survive < (counts > 0).sum():
        assert np.sort(counts)[: len(counts) - survive].sum() >= k
    else:
        assert counts.sum() == k


@pytest.mark.parametrize(("workers", "blocks"), [(5, 64), (16, 64), (20, 80)])
def test_plan_is_cut_into_64_blocks_or_four_for_each_worker(workers, blocks):
    made = plan(random_problem(1, workers, 64 * 80, np.random.default_rng(0)), "uniform", coded=False)
    assert (layout(made, 0).code.k, layout(made, 0).code.n) == (blocks, blocks)
    assert layout(made, 0).size == 64 * 80 // blocks


def test_new_layout_keeps_enough_for_a_lost_worker_only_if_asked():
    made = plan(random_problem(1, 3, 300, np.random.default_rng(0)), "uniform", coded=False)
    old, loads = layout(made, 0, blocks=6), np.full(3, 100.0)
    assert [len(owned) for owned in relayout(old, loads)[0].owned] == [2, 2, 2]
    new, moves = relayout(old, loads, survive=1)
    assert [len(owned) for owned in new.owned] == [3, 3, 3]
    assert [list(map(len, each)) for each in moves] == [[0, 0, 0], [1, 1, 1]]
    assert (new.code.k, new.code.n) == (6, 9)
    fewer, moves = relayout(new, np.array([300.0, 0.0, 0.0]))
    assert fewer.owned == ((0, 1, 6, 2, 3, 4), (), ())
    assert fewer.code.n == 7  # up to block 6
