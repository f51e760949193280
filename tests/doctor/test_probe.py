"""Watching real DDP ranks: the times are each rank's own, and the training stays bit for bit what it was."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from paceline import runs
from support import watched
from support.ranks import run_ranks

pytestmark = [pytest.mark.processes, pytest.mark.xdist_group("processes")]


def test_each_rank_s_loading_and_computing_are_told_from_its_waiting(tmp_path: Path) -> None:
    loading, computing = [0.002, 0.002, 0.03], [0.04, 0.005, 0.005]
    plain = run_ranks(3, watched.train, None, 14, 0, loading, computing)
    seen = run_ranks(3, watched.train, str(tmp_path / "run"), 14, 12, loading, computing)
    assert [values for values, _ in plain] == [values for values, _ in seen]
    assert not any(attached for _, attached in seen), "hooks are left after the last step"
    run = runs.read(tmp_path / "run")
    assert run.round.tolist() == list(range(10)), "two steps of warm-up are left out"
    assert run.loads.tolist() == [[8, 8, 8]] * 10
    loads, reducing = (np.array(run.extras[name]) for name in ("loading", "reducing"))
    # Sleeps are lower bounds, and the least of ten steps is near them on a busy machine, too. What another rank
    # slept must not show up in one's own time.
    assert run.compute[:, 0].min() >= 0.042
    assert run.compute[:, 1].min() < 0.030
    assert loads[:, 2].min() >= 0.03 > loads[:, 0].min()
    assert reducing[:, 1].max() > 0.02 > reducing[:, 0].min()


def test_accumulated_micro_batches_are_one_step(tmp_path: Path) -> None:
    run_ranks(2, watched.train, str(tmp_path / "run"), 12, 12, [0.0, 0.0], [0.004, 0.02], 4)
    run = runs.read(tmp_path / "run")
    assert run.loads.tolist() == [[32, 32]] * 10
    assert run.compute[:, 1].min() >= 0.02 > run.compute[:, 0].min()


def test_a_training_that_ends_early_leaves_what_was_reported(tmp_path: Path) -> None:
    run_ranks(2, watched.train, str(tmp_path / "run"), 17, 100, [0.0, 0.0], [0.001, 0.001])
    assert runs.read(tmp_path / "run").round.tolist() == list(range(8)), "the report after 10 steps"


def test_what_cannot_be_watched_is_said() -> None:
    for first, second in run_ranks(2, watched.refusals):
        assert "expected a DistributedDataParallel" in first
        assert "steps=1" in second


def test_a_watcher_never_ends_the_training() -> None:
    assert run_ranks(2, watched.survives) == [8, 8]


def test_what_prints_the_findings_is_missed_at_once() -> None:
    code = "import sys; sys.modules['rich'] = None; import paceline.doctor; paceline.doctor.watch(None)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.stderr.splitlines()[-1].endswith(
        "PacelineError: rich is not installed; install paceline[cli]"
    )
