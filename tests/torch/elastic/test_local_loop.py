"""Ranks that step by themselves, and are killed, freeze, leave or join."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from support import elastic_runs
from support.elastic_local import counted, played, survive
from support.elastic_phases import phased
from support.elastic_runs import FOR_EVER, SAMPLES, Told, faults, run
from support.often import times

GUARANTEES = (
    "After a lost rank, the others run its samples since the last merge, with the parameters of a replay.",
)


def check(told: Told, replay: bool = True) -> None:
    """Each sample counted once in every epoch that was finished, and the parameters are those of one process that
    plays the steps that counted."""
    assert not told.of("crash"), told.of("crash")[0][1]["trace"]
    ends = [end for _, end in told.of("end")]
    assert ends, "nobody has come to the end"
    intervals = counted(told)
    assert len(intervals) == ends[0]["rounds"]
    used: dict[int, list[int]] = {}
    for epoch, by in intervals:
        used.setdefault(epoch, []).extend(index for steps in by.values() for step in steps for index in step)
    for epoch, indices in used.items():
        assert len(indices) == len(set(indices)), epoch
        assert epoch == max(used) or sorted(indices) == [*range(SAMPLES)], epoch
    assert all(end["state"] == ends[0]["state"] for end in ends)
    if replay:
        parameters = elastic_runs.network().state_dict()
        found = torch.cat(
            [torch.tensor(ends[0]["state"][name], dtype=torch.float64).flatten() for name in parameters]
        )
        assert (found - played(intervals)).abs().max() < 1e-12


def survived(tmp_path: Path, plan: Any, ranks: int = 4, rounds: int = FOR_EVER, **options: Any) -> Told:
    return run(tmp_path, ranks, rounds, plan, job=survive, restarts=1000, **options)


def test_run_without_faults_has_parameters_of_a_replay(tmp_path: Path) -> None:
    told = survived(tmp_path, lambda *_: None, 3, 30)
    check(told)
    assert len(told.of("end")) == 3


@pytest.mark.nightly  # test_member.py has such moments, and the next test has each instant by its name
def test_run_with_faults_at_random_moments_has_parameters_of_a_replay(tmp_path: Path) -> None:
    told = survived(
        tmp_path, faults(tmp_path, ["kill", "kill", "leave", "freeze"], times(12), 0.05, seed=1), dead=1.0
    )
    check(told)
    assert len(told.faults) == times(12)


PHASES = ("piece", "sums", "committed", "step", "claiming", "counted")


@pytest.mark.parametrize("policy", ["factoring", pytest.param("level", marks=pytest.mark.nightly)])
def test_run_with_faults_at_named_instants_has_parameters_of_a_replay(tmp_path: Path, policy: str) -> None:
    kinds = ("kill", "leave", "fail", "two", "joiner", "first")
    plan = phased(
        tmp_path, times(10), seed=4, kinds=kinds, phases=PHASES if policy == "factoring" else PHASES[:4]
    )
    told = survived(tmp_path, plan, policy=policy)
    check(told)
    assert len(told.faults) >= times(10)
