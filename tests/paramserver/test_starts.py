"""Starts of workers that fail are tried again, but not without end."""

from __future__ import annotations

from paceline.paramserver.starts import RETRIES, Starts


def test_start_that_fails_is_tried_again_a_few_times() -> None:
    starts = Starts()
    starts.want()
    for _ in range(RETRIES):
        starts.began()
        assert starts.failed()
        assert starts.wanted == 1
    starts.began()
    assert not starts.failed()
    assert starts.wanted == 0


def test_worker_that_is_up_ends_the_row_of_failures() -> None:
    starts = Starts()
    for _ in range(2 * RETRIES):
        starts.want()
        starts.began()
        assert starts.failed()
        starts.began()
        starts.up()
