"""While no worker takes part: one warning, and the end when none comes back in time."""

from __future__ import annotations

import pytest

from paceline.paramserver.absence import Absence, Step

NOTHING, WARN, END = Step


@pytest.mark.parametrize(
    "looks",  # seconds, whether a worker is present, and the step
    [
        [
            (0.0, True, NOTHING),
            (5.0, False, NOTHING),
            (6.0, False, WARN),
            (17.0, False, NOTHING),
            (17.1, False, END),
        ],
        # one that comes back: the run continues, and has all its patience again
        [
            (0.0, False, NOTHING),
            (1.0, False, WARN),
            (9.0, True, NOTHING),
            (20.0, False, NOTHING),
            (21.0, False, WARN),
        ],
        # those that were only late for a moment: no warning
        [(0.0, False, NOTHING), (0.9, False, NOTHING), (1.0, True, NOTHING), (1.9, False, NOTHING)],
        # the server itself stood still, with workers that answer once they are looked at, and with others
        [(0.0, False, NOTHING), (60.0, False, WARN), (60.1, True, NOTHING)],
        [(0.0, False, NOTHING), (60.0, False, WARN), (60.1, False, END)],
    ],
)
def test_workers_that_all_freeze_get_one_warning_and_then_the_end(
    looks: list[tuple[float, bool, Step]],
) -> None:
    absence = Absence(12.0)
    for now, present, step in looks:
        assert absence.look(now, present, False) is step


def test_worker_that_is_started_gets_the_patience_anew_and_no_warning() -> None:
    absence = Absence(10.0)
    absence.began(0.0)
    assert absence.look(5.0, False, True) is NOTHING
    absence.began(14.0)
    assert absence.look(24.0, False, True) is NOTHING
    assert absence.look(24.1, False, True) is END
