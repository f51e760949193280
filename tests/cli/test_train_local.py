"""``paceline train --loop local``: workers step by themselves, each sample is used once an epoch, a run goes on."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import pytest

from support.commands import assert_refused, paceline
from support.forks import Program

pytestmark = pytest.mark.processes

GUARANTEES = (
    "A left interval restores parameters, buffers, optimizers and scaler, and its samples run again, also "
    "after a kill and `--resume`.",
)

LOCAL = ("train", "--loop", "local", "--workers", "3", "--global-batch", "48", "--epochs", "2")


def check(run: Path, samples: int) -> int:
    """Each epoch's rounds hold all samples; how many rounds there are."""
    rounds = [json.loads(line) for line in (run / "rounds.jsonl").read_text().splitlines()]
    epochs: dict[int, int] = {}
    for each in rounds:
        epochs[each["epoch"]] = epochs.get(each["epoch"], 0) + each["batch"]
    assert epochs == {0: samples, 1: samples}
    return len(rounds)


def train(place: Path, *options: str) -> None:
    process = Program(["-m", "paceline", *options], place)
    said = process.communicate(timeout=300)
    assert process.returncode == 0, said


@pytest.mark.parametrize("elastic", ["--elastic", pytest.param("--no-elastic", marks=pytest.mark.nightly)])
@pytest.mark.parametrize("every", ["4", "0.1s"])
def test_a_run_uses_each_sample_once_an_epoch(tmp_path: Path, every: str, elastic: str) -> None:
    train(
        tmp_path, *LOCAL, "--every", every, elastic, "--out", "run", "--slowdown-ms", ".1,.1,.4",
        "--outer", "nesterov:lr=0.7,momentum=0.5",
    )  # fmt: skip
    rounds = check(tmp_path / "run", 1500)
    assert rounds == 16 or every != "4"
    assert rounds < 60  # as many as there would be with a merge after each step
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["test_accuracy"] > 0.7


def test_killed_run_resumes_within_its_epoch(tmp_path: Path) -> None:
    options = (*LOCAL, "--every", "auto", "--checkpoint-every", "1", "--slowdown-ms", "2,2,6", "--out", "run")
    process = Program(["-m", "paceline", *options], tmp_path)
    while not (tmp_path / "run" / "checkpoint.pt").exists():
        assert process.poll() is None
        time.sleep(0.02)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    train(tmp_path, "train", "--resume", "run")
    check(tmp_path / "run", 1500)
    assert "is finished after" in paceline("train", "--resume", tmp_path / "run").stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--every", "4"], "--every is for --loop local"),
        (["--outer", "mean"], "--outer is for --loop local"),
        (["--loop", "lokal"], r"loop 'lokal' is unknown; did you mean local\? Expected one of round, local"),
        (["--loop", "local", "--every", "often"], "every='often': expected steps, 1 or more, seconds"),
        (["--loop", "local", "--every", "0"], "every='0': expected steps, 1 or more"),
        (["--loop", "local", "--outer", "adam"], "outer optimizer 'adam' is unknown"),
        (["--loop", "local", "--steps", "9"], "--steps counts steps of all workers"),
        (["--loop", "local", "--micro-batch", "9"], "--micro-batch cuts a step into passes"),
        (["--loop", "local", "--limits", "memory"], "--limits are samples of an interval"),
        (["--loop", "local", "--weigh", "hook"], "--weigh hook weighs what DDP sums"),
        (["--loop", "local", "--engine", "ray"], "--engine ray moves parameters by its own rules"),
    ],
)
def test_mistakes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], words: str) -> None:
    monkeypatch.chdir(tmp_path)
    assert_refused(paceline("train", *arguments), words)
    assert not list(tmp_path.iterdir())
