import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline import PacelineError
from paceline.coded import plan, random_problem
from paceline.coded.layout import layout, relayout


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
