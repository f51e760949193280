"""Whatever a loop waits for other ranks in, a rank's seconds are its own."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from paceline import runs
from paceline.torch import timing
from support.guarantees import guarantee
from support.ranks import run_ranks
from support.wait_jobs import CASES, SOME, Case, gathers_within, paced, watched

pytestmark = pytest.mark.processes

GUARANTEES = (
    "Waits for other ranks, in any collective of torch or in a communication hook, do not count as a "
    "rank's own seconds.",
)

RANKS = 3


ATTEMPTS = 8


def _check(run: Callable[[int, list[Case]], tuple[Any, Any]], cases: list[Case]) -> None:
    """What was measured is what each rank slept, and what little it computed.

    run: gives both, of shape (steps, ranks), for the number of an attempt and the cases that are its last steps. A
        busy machine makes a step now and then longer, by what does not depend on its length. So what was too long is
        repeated with steps that are twice as long, and the best attempt counts: a wait that is counted is three
        quarters of the slowest rank's step in all of them.
    """
    beyond: dict[Case, Any] = dict.fromkeys(cases, np.inf)  # as parts of the slowest rank's step
    wrong = cases
    for attempt in range(ATTEMPTS):
        slept, measured = (np.asarray(each)[-len(wrong) :] for each in run(attempt, wrong))
        assert (measured - slept > -1e-3).all()
        for case, more, longest in zip(wrong, measured - slept, slept[:, -1], strict=True):
            beyond[case] = np.minimum(beyond[case], more / longest)
        wrong = [case for case in wrong if (beyond[case] > 0.2).any()]
        if not wrong:
            return
    raise AssertionError(
        "\n".join(f"{case}: {beyond[case]} of the slowest rank's step beyond a rank's own" for case in wrong)
    )


def test_seconds_are_a_ranks_own_wherever_its_loop_waits_for_others() -> None:
    def run(attempt: int, cases: list[Case]) -> tuple[Any, Any]:
        found = run_ranks(RANKS, paced, cases, 2.0**attempt)
        return np.transpose([slept for slept, _ in found]), found[0][1]

    _check(run, CASES)


def test_the_doctor_finds_the_slow_rank_wherever_the_loop_waits(tmp_path: Path) -> None:
    from paceline.doctor.findings import diagnose

    def run(attempt: int, cases: list[Case]) -> tuple[Any, Any]:
        slept = run_ranks(RANKS, watched, str(tmp_path / str(attempt)), cases, 2.0**attempt)
        return np.transpose(slept), runs.read(tmp_path / str(attempt)).compute

    _check(run, SOME)
    said = diagnose(runs.read(tmp_path / "0")).sentences[0]
    assert said.startswith("Rank 2 takes")
    assert "the fastest rank's time per sample" in said


@guarantee(
    "A collective within rounds whose micro-steps differ between ranks "
    "raises with its file and line, and does not hang."
)
@pytest.mark.parametrize("loop", ["whole", "round", "pieces"])
def test_a_collective_within_rounds_of_unlike_turns_is_refused_and_does_not_hang(loop: str) -> None:
    for said, rounds, line in run_ranks(2, gathers_within, loop):
        if loop == "whole":
            assert (said, rounds) == ("", 4)
        else:
            assert rounds == 0
            assert f"wait_jobs.py:{line} calls a collective (allreduce) within the round" in said


def test_nothing_is_left_replaced_when_nobody_listens() -> None:
    import torch.distributed as dist
    from torch.distributed import _functional_collectives as functional

    places = [(dist.ProcessGroup, "allreduce"), (dist.Work, "wait"), (functional, "wait_tensor")]
    before = [vars(owner)[name] for owner, name in places]
    nothing = (lambda _: None), (lambda: None)
    first, second = (timing.listen(*nothing) for _ in range(2))
    first()
    first()  # which leaves the second alone
    assert all(hasattr(getattr(owner, name), "__wrapped__") for owner, name in places)
    second()
    assert [vars(owner)[name] for owner, name in places] == before


def test_waits_of_other_threads_and_of_nested_functions_count_once() -> None:
    told: list[str] = []
    stop = timing.listen(told.append, lambda: told.append("end"))
    try:
        future: torch.futures.Future[int] = torch.futures.Future()
        future.set_result(1)
        assert future.wait() == 1  # calls the wait of its base class
        import threading

        thread = threading.Thread(target=future.wait)
        thread.start()
        thread.join()
    finally:
        stop()
    assert told == ["wait", "end"]
