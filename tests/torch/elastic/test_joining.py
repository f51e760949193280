"""Ranks that are told to leave, or are killed, from ``register`` on until they have joined."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from support.elastic_jobs import FOR_EVER, alone, run
from support.elastic_phases import phased
from support.often import times

pytestmark = pytest.mark.processes

GUARANTEES = (
    "After kills, freezes, departures and joins at any instant, each sample of a round counts once, with "
    "the model of one process.",
)


def test_ranks_that_leave_or_are_killed_while_they_join(tmp_path: Path) -> None:
    plan = phased(tmp_path, times(8), seed=2, kinds=("joiner leaves", "joiner is killed"))
    told = run(tmp_path, 3, FOR_EVER, plan, restarts=1000, nap=1e-3, phases=True)
    assert not told.of("crash"), told.of("crash")[0][1]["trace"]
    assert len(told.faults) >= times(8)
    ends = [end for _, end in told.of("end")]
    expected = alone(ends[0]["rounds"])
    for end in ends:
        assert (torch.tensor(end["parameters"], dtype=torch.float64) - expected).abs().max() < 1e-12
