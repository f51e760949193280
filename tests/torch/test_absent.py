"""Ranks that are stopped, late, fail or are killed: the others name them. Real processes on a real gloo group."""

from __future__ import annotations

import pytest

from support import absent_jobs as jobs
from support.ranks import run_ranks

pytestmark = [pytest.mark.processes, pytest.mark.xdist_group("processes")]

CASES = [  # who is stopped, in which round, under which policy
    (0, 0, "equal"),
    (1, 0, "factoring"),
    (2, 2, "level"),
    (0, 2, "factoring"),
]


def test_a_stopped_rank_is_named_under_every_policy_from_the_first_round_on() -> None:
    """Also rank 0, which hosts what the ranks tell each other: every call to it hangs meanwhile."""
    told = run_ranks(3, jobs.stopped, CASES)
    for number, (who, when, policy) in enumerate(CASES):
        for rank in {0, 1, 2} - {who}:
            named = [(m.round, m.ranks) for m in told[rank][number] if not m.lives]
            assert (when, [who]) in named, (who, when, policy, rank)


def test_a_rank_that_lives_and_is_late_is_named_as_such() -> None:
    first, slow, third = run_ranks(3, jobs.late)
    for told in (first, third):
        assert (0, [1]) in [(missing.round, missing.ranks) for missing in told if missing.lives]
    assert not [missing for missing in slow if missing.lives]


@pytest.mark.parametrize(("who", "policy"), [(0, "level"), (2, "factoring")])
def test_the_rank_that_fails_is_named_with_its_error_on_the_others(who: int, policy: str) -> None:
    told = run_ranks(3, jobs.failing, who, policy)
    for rank, words in enumerate(told):
        if rank == who:
            assert words == "KeyError", "its own error is its own"
        else:
            start = f"rank {who} failed in round 2: KeyError: 'no such image'; rank {rank} cannot go on"
            assert words.startswith(start)
