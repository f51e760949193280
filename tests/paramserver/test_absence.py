"""While no worker takes part: one warning, and the end when none comes back in time."""

from __future__ import annotations

from paceline.paramserver.absence import Absence, Step


def test_workers_that_all_freeze_get_one_warning_and_then_the_end() -> None:
    absence = Absence(10.0)
    assert absence.look(0.0, True, False) is Step.NOTHING
    assert absence.look(5.0, False, False) is Step.WARN
    assert absence.look(15.0, False, False) is Step.NOTHING
    assert absence.look(15.1, False, False) is Step.END


def test_worker_that_comes_back_continues_with_all_patience() -> None:
    absence = Absence(10.0)
    assert absence.look(0.0, False, False) is Step.WARN
    assert absence.look(9.0, True, False) is Step.NOTHING
    assert absence.look(20.0, False, False) is Step.WARN
    assert absence.look(30.0, False, False) is Step.NOTHING


def test_worker_that_is_started_gets_the_patience_anew_and_no_warning() -> None:
    absence = Absence(10.0)
    absence.began(0.0)
    assert absence.look(5.0, False, True) is Step.NOTHING
    absence.began(14.0)
    assert absence.look(24.0, False, True) is Step.NOTHING
    assert absence.look(24.1, False, True) is Step.END
