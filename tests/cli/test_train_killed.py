"""The launcher of ``paceline train`` is killed, or its disk is full: the record and the checkpoint stay together."""

from __future__ import annotations

import os
import resource
import time
from pathlib import Path

import psutil
import pytest
import torch

from paceline.files import part_of
from paceline.runs import read
from support.forks import Program

pytestmark = pytest.mark.processes

GUARANTEES = (
    "After a kill or a full disk at any moment, `--resume` continues with no round missing and nothing "
    "half written.",
)

SECONDS = 300.0  # only a hang takes as long, however busy the machine is
KILLS = (1, 3)  # checkpoints of a part of the run, after which it is killed at once
OPTIONS = ["--workers", "2", "--steps", "200", "--checkpoint-every", "7", "--global-batch", "32"]


def start(place: Path, *arguments: str, most: int | None = None) -> Program:
    """most: bytes of the largest file that it may write."""
    limits = {} if most is None else {resource.RLIMIT_FSIZE: most}
    return Program(["-m", "paceline", "train", *arguments], place, limits=limits)


def written(checkpoint: Path) -> int:
    return checkpoint.stat().st_mtime_ns if checkpoint.exists() else 0


def kill_after(process: Program, checkpoint: Path, many: int) -> None:
    """SIGKILL as soon as so many checkpoints were written; returns when all that it started has ended."""
    deadline, before = time.monotonic() + SECONDS, written(checkpoint)
    while many:
        assert time.monotonic() < deadline
        assert process.poll() is None, process.communicate()
        if (now := written(checkpoint)) != before:
            before, many = now, many - 1
        time.sleep(0.0005)
    started = psutil.Process(process.pid).children(recursive=True)
    process.kill()
    process.communicate()
    psutil.wait_procs(started, timeout=SECONDS)


def kept_rounds(run_dir: Path) -> int:
    return int(torch.load(run_dir / "checkpoint.pt", weights_only=True)["pace"]["rounds"])


@pytest.mark.parametrize("elastic", ["--elastic", pytest.param("--no-elastic", marks=pytest.mark.nightly)])
def test_a_killed_launcher_leaves_no_gap_in_the_record(tmp_path: Path, elastic: str) -> None:
    run_dir = tmp_path / "run"
    arguments = [*OPTIONS, elastic, "--out", "run"]
    for kill in KILLS:
        process = start(tmp_path, *arguments)
        kill_after(process, run_dir / "checkpoint.pt", kill)
        run = read(run_dir)
        assert not run.notes or "cut off" in run.notes[0]
        assert len(run.round) >= kept_rounds(run_dir), "the record is behind its checkpoint"
        part_of(run_dir / "checkpoint.pt").write_bytes(b"as one that is killed in mid-writing leaves it")
        arguments = ["--resume", "run"]
    _, err = start(tmp_path, *arguments).communicate(timeout=SECONDS)
    assert not err
    run = read(run_dir)
    assert (run.round.tolist(), run.notes) == (list(range(200)), [])
    assert [part["round"] for part in run.config["resumed"]] == sorted(
        part["round"] for part in run.config["resumed"]
    )
    assert sorted(path.name for path in run_dir.iterdir()) == [
        "checkpoint-previous.pt", "checkpoint.pt", "report.html", "rounds.jsonl", "run.json", "summary.json",
        "trace.json",
    ]  # fmt: skip


@pytest.mark.parametrize("elastic", ["--elastic", pytest.param("--no-elastic", marks=pytest.mark.nightly)])
def test_a_record_that_cannot_grow_is_not_behind_its_checkpoint(tmp_path: Path, elastic: str) -> None:
    """As on a full disk: a checkpoint takes the place of an older one, and the record needs room."""
    run_dir = tmp_path / "run"
    process = start(tmp_path, *OPTIONS, elastic, "--out", "run")
    kill_after(process, run_dir / "checkpoint.pt", 2)
    record = (run_dir / "rounds.jsonl").stat().st_size
    most = max(record, os.stat(run_dir / "checkpoint.pt").st_size) + 20_000
    _, err = start(tmp_path, "--resume", "run", most=most).communicate(timeout=SECONDS)
    assert "cannot write run/rounds.jsonl: File too large; free some disk space and resume" in err
    assert "Traceback" not in err
    assert len(read(run_dir).round) >= kept_rounds(run_dir)
    _, err = start(tmp_path, "--resume", "run").communicate(timeout=SECONDS)
    assert not err
    run = read(run_dir)
    assert (run.round.tolist(), run.notes) == (list(range(200)), [])
