"""Workers that are killed, runs that are interrupted, checkpoints that are damaged: real processes throughout."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch

from paceline.runs import read

pytestmark = [pytest.mark.processes, pytest.mark.xdist_group("processes")]

LONG = ["--workers", "3", "--pace-ms", "1,1,2", "--epochs", "40", "--checkpoint-every", "5"]
SHORT = ["--workers", "2", "--steps", "8", "--checkpoint-every", "3"]


def start(arguments: list[str], place: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "paceline", "train", *arguments],
        cwd=place, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True,
    )  # fmt: skip


def train(arguments: list[str], place: Path, status: int = 0) -> tuple[str, str]:
    process = start(arguments, place)
    out, err = process.communicate(timeout=180)
    assert process.returncode == status, err
    return out, err


def rounds(run_dir: Path) -> int:
    record = run_dir / "rounds.jsonl"
    return record.read_bytes().count(b"\n") if record.exists() else 0


def wait_for_rounds(run_dir: Path, count: int, process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 90
    while rounds(run_dir) < count:
        assert time.monotonic() < deadline, f"no {count} rounds in 90 s"
        assert process.poll() is None, process.communicate()[1]
        time.sleep(0.02)


def workers_of(process: subprocess.Popen[str]) -> list[psutil.Process]:
    """The training processes below the command, in the order of their start."""
    below = psutil.Process(process.pid).children(recursive=True)
    busy = [p for p in below if p.num_threads() > 2 and "forkserver" not in " ".join(p.cmdline()[:2])]
    return sorted(busy, key=lambda p: p.create_time())


def test_a_killed_worker_is_named_and_the_run_resumes(tmp_path: Path) -> None:
    process = start([*LONG, "--out", "run"], tmp_path)
    run_dir = tmp_path / "run"
    wait_for_rounds(run_dir, 12, process)
    victim = workers_of(process)[-1]
    victim.send_signal(signal.SIGKILL)
    killed = time.monotonic()
    _, err = process.communicate(timeout=60)
    assert time.monotonic() - killed < 10
    assert process.returncode == 1
    assert "was killed by SIGKILL" in err
    assert err.strip().splitlines()[-1].startswith("paceline: worker 2 was killed")
    assert "--resume" in err
    assert "Traceback" not in err
    assert not psutil.pid_exists(victim.pid)

    before = len(read(run_dir).round)
    assert before >= 12
    out, _ = train(["--resume", "run", "--steps", str(before + 3), "--json", "-"], tmp_path)
    summary = json.loads(out)
    assert summary["steps"] == before + 3
    assert read(run_dir).round.tolist() == list(range(before + 3))


def test_resuming_gives_the_model_of_an_unbroken_run(tmp_path: Path) -> None:
    options = ["--workers", "2", "--policy", "equal", "--seed", "3", "--checkpoint-every", "4"]
    train([*options, "--steps", "14", "--out", "whole"], tmp_path)
    train([*options, "--steps", "9", "--out", "parts"], tmp_path)
    train(["--resume", "parts", "--steps", "14"], tmp_path)
    whole, parts = (
        torch.load(tmp_path / name / "checkpoint.pt", weights_only=True)["model"]
        for name in ("whole", "parts")
    )
    torch.testing.assert_close(parts, whole, rtol=1e-5, atol=1e-6)  # single precision, sums in another order
    _, err = train(["--resume", "parts", "--steps", "14"], tmp_path, status=2)
    assert "nothing to resume" in err


def test_ctrl_c_ends_all_workers_and_leaves_a_readable_record(tmp_path: Path) -> None:
    process = start([*LONG, "--out", "run"], tmp_path)
    wait_for_rounds(tmp_path / "run", 5, process)
    workers = workers_of(process)
    assert len(workers) >= 3
    os.killpg(process.pid, signal.SIGINT)  # what a terminal does
    _, err = process.communicate(timeout=30)
    assert process.returncode == 130
    assert "Traceback" not in err
    assert not [p for p in workers if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]
    run = read(tmp_path / "run")
    assert len(run.round) >= 5
    assert not run.notes
    assert (tmp_path / "run" / "report.html").exists()


def test_a_loss_that_is_no_number_stops_the_run(tmp_path: Path) -> None:
    _, err = train(["--workers", "2", "--lr", "1e30", "--out", "run"], tmp_path, status=2)
    assert "the loss became" in err
    assert "at step" in err
    assert "Traceback" not in err


def test_damaged_checkpoints_are_refused(tmp_path: Path) -> None:
    train([*SHORT, "--out", "run"], tmp_path)
    checkpoint = tmp_path / "run" / "checkpoint.pt"
    whole = checkpoint.read_bytes()
    for damaged in (whole[: len(whole) // 2], b"", b"\x80\x04not a checkpoint", whole[:-1000] + bytes(1000)):
        checkpoint.write_bytes(damaged)
        _, err = train(["--resume", "run", "--steps", "9"], tmp_path, status=2)
        assert "checkpoint.pt is damaged or is no checkpoint" in err
        assert "Traceback" not in err
        assert checkpoint.read_bytes() == damaged
        assert rounds(tmp_path / "run") == 8


@pytest.mark.parametrize("workers", [2, 3])
def test_torchrun_joins_and_restarts_a_killed_worker(tmp_path: Path, workers: int) -> None:
    """The third worker count dies once in mid-run; its restart goes on from the checkpoint."""
    kill = workers == 3
    process = subprocess.Popen(
        [
            sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(workers),
            "--max-restarts", "1", "-m", "paceline", "train", "--steps", "40", "--pace-ms",
            ",".join(["1"] * workers), "--checkpoint-every", "5", "--out", "run", "--json", "run.json",
        ],
        cwd=tmp_path, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        env=os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
    )  # fmt: skip
    if kill:
        wait_for_rounds(tmp_path / "run", 8, process)
        workers_of(process)[-1].send_signal(signal.SIGKILL)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    summary = json.loads((tmp_path / "run.json").read_text())
    assert summary["steps"] == 40
    assert summary["workers"] == workers
    assert read(tmp_path / "run").round.tolist() == list(range(40))
    assert out.count("Report:") == 1, "only rank 0 speaks"
