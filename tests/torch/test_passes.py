"""A rank tells of its round when its own gradients are there, whatever it then waits for."""

from __future__ import annotations

import pytest

from support.last_jobs import QUICK, WAYS, told_in_time, wrong_rounds
from support.ranks import run_ranks

pytestmark = pytest.mark.processes

GUARANTEES = (
    "Waits for other ranks, in any collective of torch or in a communication hook, do not count as a "
    "rank's own seconds.",
)


def test_told_before_the_gradients_of_others_are_waited_for() -> None:
    hooked = {way.__name__: way not in QUICK for way in WAYS}
    assert run_ranks(2, told_in_time) == [hooked, hooked], "a hook of each parameter costs every pass"


def test_a_pass_that_is_not_pacelines_is_told_from_none_at_all() -> None:
    for of_a_pass, of_none in run_ranks(2, wrong_rounds):
        assert "after a backward pass that is not Paceline's" in of_a_pass
        assert "before all its gradients were there" in of_none
