"""The records of real runs do not contradict themselves, whatever the ranks do within and between the rounds."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.runs import read
from support.commands import paceline
from support.ranks import run_ranks
from support.records import faults, hold_up


@pytest.mark.processes
@pytest.mark.parametrize("loop", ["whole", "round", "local"])
@pytest.mark.parametrize("seed", [1, 2])
def test_record_of_ranks_with_random_pauses_is_consistent(tmp_path: Path, loop: str, seed: int) -> None:
    policy = "level" if loop == "local" or seed == 1 else "auto"
    assert all(run_ranks(3, hold_up, str(tmp_path / "run"), loop, policy, seed))
    run = read(tmp_path / "run")
    assert len(run.round) >= 8
    assert faults(run) == []


@pytest.mark.processes
def test_record_of_paceline_train_is_consistent(tmp_path: Path) -> None:
    out = tmp_path / "run"
    said = paceline("train", "--slowdown-ms", "0,0.1,0.2", "--workers", 3, "--steps", "40", "--out", out)
    assert said.status == 0, said.stderr
    run = read(out)
    assert len(run.round) == 40
    assert faults(run) == []
