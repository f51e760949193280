"""Ranks that meet: the store that rank 0 hosts beside the process group's."""

from __future__ import annotations

import pytest

from support.peers_jobs import left_early, out_of_reach
from support.ranks import run_ranks

pytestmark = [pytest.mark.processes, pytest.mark.xdist_group("torch")]


def test_rank_0_may_leave_at_once_and_the_others_are_connected_all_the_same() -> None:
    assert run_ranks(2, left_early, 0.5) == ["connected"] * 2


@pytest.mark.parametrize("who", [0, 1])
def test_a_rank_that_cannot_reach_the_store_is_named_on_every_rank(who: int) -> None:
    for sentence in run_ranks(3, out_of_reach, who):
        assert sentence.startswith(f"rank {who} cannot reach rank 0 at 127.0.0.1")
