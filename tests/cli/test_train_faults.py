"""Workers that are killed, runs that are interrupted, checkpoints that are damaged: real processes throughout."""

from __future__ import annotations

import contextlib
import io
import json
import os
import signal
from pathlib import Path

import psutil
import pytest
import torch

from paceline.runs import read
from paceline.train import checkpoint
from paceline.train.checkpoint import with_digest
from support.commands import assert_refused, paceline
from support.events import until
from support.forks import Program, all_well, as_torchrun, below
from support.guarantees import guarantee
from support.trainings import rounds, session_of

pytestmark = pytest.mark.processes

SECONDS = 300.0  # only a hang takes as long, however busy the machine is
LONG = ["--workers", "3", "--slowdown-ms", "1,1,2", "--epochs", "40", "--checkpoint-every", "5"]
SHORT = ["--workers", "2", "--steps", "8", "--checkpoint-every", "3"]


def start(arguments: list[str], place: Path, *ignored: int) -> Program:
    """``paceline train`` in a session of its own. ignored: signals that its parent ignores, as some shells do."""
    return Program(["-m", "paceline", "train", *arguments], place, ignored=ignored)


def train(arguments: list[str], place: Path, status: int = 0) -> tuple[str, str]:
    """``paceline train`` in this process, whose workers need not load PyTorch first; standard output and error."""
    with contextlib.chdir(place):
        said = paceline("train", *arguments)
    assert said.status == status, said.stderr
    return said.stdout, said.stderr


def wait_for_rounds(run_dir: Path, count: int, process: Program) -> None:
    until(lambda: rounds(run_dir) >= count, process)


def workers_of(process: Program) -> list[psutil.Process]:
    """The training processes below the command, in the order of their start."""
    busy = [
        p for p in below(process.pid) if p.num_threads() > 2 and "forkserver" not in " ".join(p.cmdline()[:2])
    ]
    return sorted(busy, key=lambda p: p.create_time())


@guarantee(
    "`paceline train --no-elastic` ends with status 1 and names a worker that stopped or was killed, also "
    "before the first round."
)
def test_a_killed_worker_is_named_and_the_run_resumes(tmp_path: Path) -> None:
    process = start([*LONG, "--no-elastic", "--out", "run"], tmp_path)
    run_dir = tmp_path / "run"
    wait_for_rounds(run_dir, 12, process)
    victim = workers_of(process)[-1]
    victim.send_signal(signal.SIGKILL)
    _, err = process.communicate(timeout=SECONDS)
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


@guarantee(
    "Ctrl-C, SIGTERM or a closed terminal leave a whole record and no process, with status 130, 143 or 129, "
    "also if SIGINT was ignored."
)
@pytest.mark.parametrize(
    ("sent", "times", "status", "ignored", "flags"),
    [
        (signal.SIGINT, 1, 130, [signal.SIGINT], []),  # started by a script with &, or by many a CI runner
        (signal.SIGTERM, 2, 143, [], []),  # twice, as `timeout` does; the workers are told to leave, too
        (signal.SIGTERM, 2, 143, [], ["--no-elastic"]),
    ],
)
def test_signals_end_all_workers_and_leave_a_readable_record(
    tmp_path: Path, sent: int, times: int, status: int, ignored: list[int], flags: list[str]
) -> None:
    process = start([*LONG, *flags, "--out", "run"], tmp_path, *ignored)
    wait_for_rounds(tmp_path / "run", 5, process)
    assert len(workers_of(process)) >= 3
    for _ in range(times):
        os.killpg(process.pid, sent)  # what a terminal does, and `timeout`, and most that start jobs
    out, err = process.communicate(timeout=SECONDS)
    assert (process.returncode, err.strip()) == (status, "paceline: interrupted")
    assert "finished steps are on record in run" in out
    until(lambda: not session_of(process))
    run = read(tmp_path / "run")
    assert len(run.round) >= 5
    assert not run.notes
    assert (tmp_path / "run" / "report.html").exists()


@guarantee(
    "A command that is killed with SIGKILL leaves no workers and no loader processes, also while its workers "
    "start."
)
def test_a_launcher_killed_while_workers_start_leaves_none(tmp_path: Path) -> None:
    process = start([*LONG, "--workers", "6", "--slowdown-ms", "1,1,1,1,1,1", "--out", "run"], tmp_path)
    # Two serve the workers, some of whom have come so far that they wait for the others.
    until(lambda: len(below(process.pid)) >= 6)
    process.kill()
    process.wait(SECONDS)
    until(lambda: not session_of(process))


@guarantee(
    "A command that is killed with SIGKILL leaves no workers and no loader processes, also while its workers "
    "start."
)
def test_a_killed_launcher_leaves_no_workers_and_no_loaders(tmp_path: Path) -> None:
    process = start(
        ["--workers", "2", "--slowdown-ms", "1,1", "--epochs", "40", "--loader-workers", "1", "--out", "run"],
        tmp_path,
    )
    wait_for_rounds(tmp_path / "run", 2, process)
    process.kill()
    process.wait(SECONDS)
    until(lambda: not session_of(process))


@guarantee(
    "`paceline train --no-elastic` ends with status 1 and names a worker that stopped or was killed, also "
    "before the first round."
)
def test_a_worker_killed_before_the_first_round_leaves_good_advice(tmp_path: Path) -> None:
    process = start([*LONG, "--no-elastic", "--out", "run"], tmp_path)
    until(lambda: len(workers_of(process)) >= 3)
    victim = workers_of(process)[-1]
    victim.kill()
    _, err = process.communicate(timeout=SECONDS)
    said = err.strip().splitlines()[-1]
    assert process.returncode == 1
    assert "was killed by SIGKILL" in said
    if (tmp_path / "run" / "run.json").exists():  # killed a moment later than planned
        assert "--resume run" in said
    else:
        assert said.endswith(
            "killed by SIGKILL before the first round was done; the other workers were ended; "
            "nothing of the run was written yet: start it again"
        )


def test_a_loss_that_is_no_number_stops_the_run(tmp_path: Path) -> None:
    for flag in ("--elastic", "--no-elastic"):
        _, err = train(["--workers", "2", "--lr", "1e30", flag, "--out", f"run{flag}"], tmp_path, status=2)
        assert "the loss became" in err
        assert "at step" in err
        assert "Traceback" not in err


@guarantee(
    "A damaged checkpoint is found when it is read, and the one before it is used; if both are damaged, "
    "nothing changes."
)
def test_a_damaged_checkpoint_gives_way_to_the_one_before_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    # Checkpoints after 3, 6 and 8 steps.
    out, _ = train([*SHORT, "--policy", "equal", "--seed", "3", "--out", "run"], tmp_path)
    lines = out.splitlines()
    assert lines[-5:-3] == ["Report: run/report.html (open it in a browser)", "Next, each a line to paste:"]
    started = lines[0].removeprefix("Watch this run in a browser: ").removesuffix(" watch run")
    assert lines[-3] == f"  {started} watch run  # look at the run in a browser"
    assert lines[-2].startswith(f"  {started} whatif run  # ")
    assert lines[-1].startswith(f"  {started} doctor -- ")
    newest, older = Path("run/checkpoint.pt"), Path("run/checkpoint-previous.pt")
    good = newest.read_bytes()
    for at in range(0, len(good), len(good) // 20):
        damaged = good[:at] + bytes(byte ^ 0xFF for byte in good[at : at + 8]) + good[at + 8 :]
        newest.write_bytes(damaged)
        parts = checkpoint.of_run(Path("run"))
        assert parts.load()["pace"]["rounds"] == 6, f"8 bytes flipped at {at}"
        assert "checkpoint.pt is damaged" in parts.note

    out, _ = train(["--resume", "run", "--steps", "8"], tmp_path)
    assert "continuing from step 6" in out
    assert "checkpoint.pt is damaged or is no checkpoint" in out
    assert "continues from the checkpoint before it, checkpoint-previous.pt" in out
    assert read(Path("run")).round.tolist() == list(range(8))
    assert_same_model(newest.read_bytes(), good)
    assert checkpoint.decode(older.read_bytes())["pace"]["rounds"] == 6, "the damaged one was not kept"

    older.unlink()
    rounds_before = rounds(Path("run"))
    for damaged in (good[: len(good) // 2], b"", b"\x80\x04not a checkpoint", good[:-1000] + bytes(1000)):
        newest.write_bytes(damaged)
        assert_refused(
            paceline("train", "--resume", "run", "--steps", "9"),
            r"checkpoint\.pt is damaged or is no checkpoint",
        )
        assert newest.read_bytes() == damaged
        assert rounds(Path("run")) == rounds_before

    parts = torch.load(io.BytesIO(good), weights_only=True)
    for name, wrong in [
        ("pace", {}), ("rounds", "x"), ("rounds", -3), ("policy", 5), ("version", 2), ("version", None),
        ("samples_done", 1.5), ("balancer", []), ("global_batch", True),
    ]:  # fmt: skip
        pace = wrong if name == "pace" else parts["pace"] | {name: wrong}
        newest.write_bytes(with_digest(checkpoint.encode(**parts | {"pace": pace})))
        refused = paceline("train", "--resume", "run", "--steps", "9")
        assert_refused(refused, f"the state of Pace has {'version' if name == 'pace' else name}=")

    newest.write_bytes(good)
    assert_refused(paceline("train", "--resume", "run", "--steps", "8"), "run is finished after 8 steps")
    assert_refused(
        paceline("train", "--resume", "run", "--steps", "9", "--lr", "1"), "run's own options; leave out --lr"
    )


def assert_same_model(first: bytes, second: bytes) -> None:
    ours, theirs = (checkpoint.decode(content)["model"] for content in (first, second))
    for name, value in ours.items():
        assert torch.equal(value, theirs[name]), name


TOGETHER = ["--steps", "40", "--checkpoint-every", "5", "--out", "run", "--json", "run.json"]


def assert_one_whole_run(place: Path, workers: int, out: str) -> None:
    summary = json.loads((place / "run.json").read_text())
    assert summary["steps"] == 40
    assert summary["workers"] == workers
    assert read(place / "run").round.tolist() == list(range(40))
    assert out.count("Report:") == 1, "only rank 0 speaks"
    assert out.count("A worker that is lost ends this run: torchrun has started its workers") == 1


def test_ranks_that_a_launcher_started_train_together(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text("from paceline.cli import main\n\nmain()\n")
    with contextlib.chdir(tmp_path):
        out, _ = all_well(as_torchrun(2), [program, "train", "--slowdown-ms", "1,1", *TOGETHER])
    assert_one_whole_run(tmp_path, 2, out)


def test_torchrun_restarts_a_killed_worker(tmp_path: Path) -> None:
    """It dies in mid-run; the restart goes on from the checkpoint."""
    process = Program(
        [
            "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--max-restarts", "1",
            "-m", "paceline", "train", "--slowdown-ms", "1,1", *TOGETHER,
        ],
        tmp_path, {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
    )  # fmt: skip
    wait_for_rounds(tmp_path / "run", 8, process)
    workers_of(process)[-1].send_signal(signal.SIGKILL)
    out, err = process.communicate(timeout=SECONDS)
    assert process.returncode == 0, err
    assert_one_whole_run(tmp_path, 2, out)
