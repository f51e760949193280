"""Each rank's own link is measured once, if sums take long, and at the same round on all ranks."""

from __future__ import annotations

import pytest

from support.guarantees import guarantee
from support.link_jobs import LATE, asked, slow_link
from support.ranks import run_ranks

pytestmark = pytest.mark.processes


@guarantee("A rank with a slow link is named; links are measured once, and only if sums take long.")
def test_the_slow_link_is_told_from_those_of_its_peers() -> None:
    for slow in (0, 2):
        first, *others = run_ranks(4, slow_link, slow)
        assert first is not None
        assert all(other == first for other in others)
        assert first[slow] > 2 * LATE  # on the way there and on the way back
        assert max(link for rank, link in enumerate(first) if rank != slow) < LATE


def test_two_ranks_share_their_link() -> None:
    assert run_ranks(2, slow_link, 0) == [None, None]


@guarantee("A rank with a slow link is named; links are measured once, and only if sums take long.")
def test_links_are_measured_once_and_only_if_sums_take_long() -> None:
    for alone in (False, True):
        first, *others = run_ranks(3, asked, 0.0, alone, seconds=120)
        assert all(other == first for other in others)
        assert [len(links) for links in first if links is not None] == [3]
    for told in run_ranks(3, asked, 1e3):
        assert told == [None] * 30
