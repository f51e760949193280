"""Ranks that meet: the store that rank 0 hosts beside the process group's, and the connections between all."""

from __future__ import annotations

import pytest

from support.peers_jobs import cut_off, hindered, left_early, out_of_reach
from support.ranks import run_ranks

pytestmark = [pytest.mark.processes, pytest.mark.xdist_group("torch")]


def test_rank_0_may_leave_at_once_and_the_others_are_connected_all_the_same() -> None:
    assert run_ranks(2, left_early, 0.5) == ["connected"] * 2


@pytest.mark.parametrize("who", [0, 1])
def test_a_rank_that_cannot_reach_the_store_is_named_on_every_rank(who: int) -> None:
    for sentence in run_ranks(3, out_of_reach, who):
        assert sentence.startswith(f"rank {who} cannot reach rank 0 at 127.0.0.1")


def test_rounds_keep_apart_whatever_becomes_of_their_messages() -> None:
    for rank, found in enumerate(run_ranks(3, hindered)):
        assert found["left"] == [40.0, 41.0, 42.0], "the round before was left, and its message is no other's"
        assert found["early"] == [[50.0, 51.0, 52.0], [60.0, 61.0, 62.0]]
        assert found["cut"] == [70.0, 71.0, 72.0]
        assert found["gone"] == [80.0, 81.0, 82.0], "a rank may go as soon as it has sent"
        if rank != 2:
            assert "rank 2 has left the run" in found["missing"]


def test_ranks_that_cannot_call_on_each_other_tell_their_speeds_by_collectives() -> None:
    assert run_ranks(3, cut_off) == ["GroupExchange"] * 3
