"""Watching real DDP ranks: the times are each rank's own, and the training stays bit for bit what it was."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from paceline import runs
from support import watched
from support.commands import installs
from support.guarantees import guarantee
from support.ranks import run_ranks

CHANGES_NOTHING = guarantee(
    "The doctor keeps all parameters bit for bit and the program's own hooks; its failure does not end "
    "the training."
)

pytestmark = pytest.mark.processes


def phase(run: runs.Run, name: str) -> np.ndarray:
    """Seconds, shape (T, n)."""
    return np.array([row[name] for row in run.extras["phases"]])


@CHANGES_NOTHING
@guarantee(
    "The doctor finds the time that a rank loses in the loader, a pass or the step, and does not count waits "
    "for others."
)
def test_each_phase_is_distinguished_from_the_others_and_from_waiting(tmp_path: Path) -> None:
    """Each of three ranks sleeps in two other phases; a sleep shows there, on that rank, and nowhere else."""
    pauses = [
        {"FETCH": 0.12, "BETWEEN": 0.1},
        {"PREPARE": 0.12, "BACKWARD": 0.1},
        {"FORWARD": 0.12, "FINISH": 0.1},
    ]
    plain = run_ranks(3, watched.train, None, 9, 0, [{}] * 3)  # sleeps change no parameters
    seen = run_ranks(3, watched.train, str(tmp_path / "run"), 9, 8, pauses)
    assert [values for values, _ in plain] == [values for values, _ in seen]
    assert not any(attached for _, attached in seen), "hooks are left after the last step"
    run = runs.read(tmp_path / "run")
    assert run.round.tolist() == list(range(6)), "two steps of warm-up are left out"
    assert run.loads.tolist() == [[8, 8, 8]] * 6
    # Sleeps are lower bounds, and the least of six steps is near them on a busy machine, too.
    for name in watched.PHASES:
        for rank, pause in enumerate(pauses):
            least = phase(run, name)[:, rank].min()
            assert least >= pause[name] if name in pause else least < 0.09, (name, rank)
    assert run.compute.min() >= 0.22
    assert phase(run, "REDUCE").min() < 0.09, "what the others slept is not one's own time"
    assert np.allclose(run.overhead, phase(run, "FINISH")), "what does not grow with the samples"
    whole = run.compute + phase(run, "REDUCE")
    longest = np.maximum(whole[:, 0], run.compute.max(axis=1))
    assert np.allclose(run.seconds, longest), "nothing of a step is left out or told twice"
    assert np.allclose(whole.sum(axis=0), whole[:, 0].sum(), rtol=0.3), "all end their steps together"
    told = run.extras["loop"][-1]
    assert [each["loader"] for each in told] == [
        {"processes": 0, "stream": False, "options": ["shuffle=False"]}
    ] * 3
    assert told[0]["host"] == ""


@pytest.mark.parametrize("synchronised", [False, True])
def test_accumulated_micro_batches_are_one_step(tmp_path: Path, synchronised: bool) -> None:
    pauses = [{}, {"FORWARD": 0.1, "PREPARE": 0.1, "FETCH": 0.1}]
    run_ranks(2, watched.train, str(tmp_path / "run"), 8, 8, pauses, 4, synchronised)
    run = runs.read(tmp_path / "run")
    assert run.loads.tolist() == [[32, 32]] * 6
    assert run.compute[:, 1].min() >= 0.3 > run.compute[:, 0].min()
    for name in ("FORWARD", "PREPARE", "FETCH"):
        assert phase(run, name)[:, 1].min() >= 0.1
    counts = run.extras["counts"][-1]
    assert np.array(run.extras["parts"][-1])[:, 2].tolist() == counts["backwards"]
    assert counts == {"fetches": [4, 4], "backwards": [4, 4], "exchanges": [4, 4] if synchronised else [1, 1]}


def test_the_line_that_sleeps_is_found(tmp_path: Path) -> None:
    run_ranks(2, watched.train, str(tmp_path / "run"), 17, 16, [{}, {"PREPARE": 0.06, "FETCH": 0.03}])
    lines = [each["lines"] for each in runs.read(tmp_path / "run").extras["loop"][-1]]
    assert lines[1]["PREPARE"].startswith("watched.py, line ")
    assert lines[1]["PREPARE"].endswith(': time.sleep(pause["PREPARE"])')
    assert lines[1]["FETCH"].endswith(": time.sleep(self.pause)")


def test_a_training_that_ends_early_leaves_what_was_reported(tmp_path: Path) -> None:
    """Its batches come from no DataLoader, and none is told of."""
    run_ranks(2, watched.train, str(tmp_path / "run"), 17, 100, [{"FORWARD": 0.001}] * 2, 1, False, False)
    run = runs.read(tmp_path / "run")
    assert run.round.tolist() == list(range(8)), "the report after 10 steps"
    assert run.extras["counts"][-1]["fetches"] == [0, 0]
    assert run.extras["loop"][-1][0]["loader"] is None


@guarantee(
    "The doctor finds the time that a rank loses in the loader, a pass or the step, and does not count waits "
    "for others."
)
def test_waiting_in_the_backward_pass_of_a_second_module_is_no_work() -> None:
    quick, slow = run_ranks(2, watched.second)
    assert min(slow) >= 0.1
    assert min(quick) < 0.05


def test_model_that_cannot_be_watched_raises() -> None:
    for first, second in run_ranks(2, watched.refusals):
        assert "expected a DistributedDataParallel" in first
        assert "steps=1" in second


@CHANGES_NOTHING
def test_a_watcher_never_ends_the_training() -> None:
    assert run_ranks(2, watched.survives) == [8, 8]


@CHANGES_NOTHING
def test_a_hook_of_the_program_behind_the_doctors_runs_at_each_step() -> None:
    assert run_ranks(2, watched.with_others) == [(8, 0)] * 2


def test_what_prints_the_findings_is_missed_at_once() -> None:
    code = "import sys; sys.modules['rich'] = None; import paceline.doctor; paceline.doctor.watch(None)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert re.search(f"PacelineError: rich is not installed; {installs('cli')}$", done.stderr.strip())
