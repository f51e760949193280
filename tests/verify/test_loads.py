"""The loads of each run, as the command line gives them and as they are divided by default."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.errors import PacelineError
from paceline.verify.loads import EQUAL, IDLE, ONE, UNEVEN, divided, parsed


def test_loads_are_equal_uneven_idle_and_on_one_rank() -> None:
    free = [1] * 3, [72] * 3
    assert divided(EQUAL, 72, *free) == [24, 24, 24]
    uneven = divided(UNEVEN, 72, *free)
    assert uneven == [10, 21, 41]
    assert divided(IDLE, 72, *free) == [0, 36, 36]
    assert divided(ONE, 72, *free) == [72, 0, 0]


def test_limits_that_fix_all_loads_do_not_count() -> None:
    assert divided(IDLE, 24, [16, 4, 4], [16, 4, 4]) == [0, 12, 12]


def test_limits_without_room_for_an_idle_rank_give_none() -> None:
    assert divided(IDLE, 24, [1] * 3, [8] * 3) is None
    assert divided(ONE, 24, [1] * 3, [16] * 3) is None


def test_loads_are_multiples_of_a_quantum() -> None:
    assert divided(UNEVEN, 24, [2] * 2, [24] * 2, 4) == [8, 16]


@given(
    st.sampled_from([EQUAL, UNEVEN, IDLE, ONE]),
    st.integers(1, 400),
    st.lists(st.tuples(st.integers(0, 3), st.integers(4, 400)), min_size=2, max_size=6),
)
def test_loads_sum_to_the_batch_within_the_limits(
    kind: str, batch: int, limits: list[tuple[int, int]]
) -> None:
    least, most = [low for low, _ in limits], [high for _, high in limits]
    loads = divided(kind, batch, least, most)
    if loads is None:
        assert sum({IDLE: most[1:], ONE: most[:1]}.get(kind, most)) < batch
        return
    assert sum(loads) == batch
    assert all(load <= high for load, high in zip(loads, most, strict=True))
    if kind == IDLE:
        assert loads[0] == 0
    if kind == ONE:
        assert not any(loads[1:])
    elif sum(least) <= batch:
        assert all(low <= load for low, load in zip(least[1:], loads[1:], strict=True))


def test_loads_of_the_command_line_are_read() -> None:
    assert parsed("8/16/48,0/36/36") == [[8, 16, 48], [0, 36, 36]]


@pytest.mark.parametrize("text", ["", "8", "8/x", "8/16,8/15", "8/16,8/8/8", "-8/32"])
def test_loads_that_are_none_are_refused(text: str) -> None:
    with pytest.raises(PacelineError, match="expected samples of each rank"):
        parsed(text)
