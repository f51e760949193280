"""Workers of ``paceline train`` that are stopped: the run ends with a sentence that names them."""

from __future__ import annotations

import re
import signal
import subprocess
import time
from pathlib import Path

import psutil
import pytest

from paceline.errors import WorkerError
from paceline.torch.liveness.detector import FailureDetector
from paceline.train.launch import check_stopped
from support.commands import assert_refused, paceline
from support.events import until
from support.forks import Program, below
from support.trainings import workers_of

pytestmark = pytest.mark.processes

GUARANTEES = (
    "`paceline train --no-elastic` ends with status 1 and names a worker that stopped or was killed, also "
    "before the first round.",
)


def test_a_rank_0_that_is_stopped_while_it_starts_ends_the_run(tmp_path: Path) -> None:
    process = Program(
        [
            "-m", "paceline", "train", "--workers", "2", "--policy", "equal", "--epochs", "99",
            "--slowdown-ms", "2,2", "--patience", "2", "--no-elastic", "--out", "run",
        ],
        tmp_path,
    )  # fmt: skip
    until(lambda: len(workers_of(process)) >= 2, process)
    workers = workers_of(process)
    workers[0].send_signal(signal.SIGSTOP)
    _, err = process.communicate(timeout=400)
    assert process.returncode == 1
    assert "Traceback" not in err
    assert re.search(
        r"^paceline: worker 0 has been stopped|^paceline: .*rank 0 has given no heartbeat", err, re.M
    )
    assert not [p for p in workers if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]


@pytest.mark.parametrize("begun", [False, True])
def test_killed_fork_server_has_a_separate_message(begun: bool, tmp_path: Path) -> None:
    options = [
        "--workers",
        "2",
        "--policy",
        "equal",
        "--epochs",
        "99",
        "--slowdown-ms",
        "2,2",
        "--out",
        "run",
    ]
    process = Program(["-m", "paceline", "train", *options], tmp_path)
    server: psutil.Process | None = None
    while server is None or (begun and not (tmp_path / "run" / "rounds.jsonl").exists()):
        assert process.poll() is None, process.communicate()[1]
        parents = [
            each.ppid() for each in below(process.pid) if each.ppid() != process.pid
        ]  # of the first worker
        server = psutil.Process(parents[0]) if parents else None
        time.sleep(0.02)
    server.kill()
    _, err = process.communicate(timeout=400)
    assert process.returncode == 1
    assert "paceline: the process that starts the workers was killed, perhaps for lack of memory" in err
    assert "Traceback" not in err


# The first worker that starts does something to itself, before it gives a heartbeat.
PROGRAM = """
import os
import signal

if __name__ == "__main__":
    from paceline.cli import main

    main()
else:
    try:
        os.close(os.open("first", os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        pass
    else:
        os.kill(os.getpid(), signal.{sent})
"""


@pytest.mark.parametrize(
    ("sent", "words"),
    [
        ("SIGSTOP", r"has been stopped, as by SIGSTOP, for 2 s; the run was ended"),
        ("SIGKILL", r"was killed by SIGKILL before the first round was done; the other workers were ended"),
    ],
)
def test_a_run_that_has_not_begun_needs_all_workers(sent: str, words: str, tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM.format(sent=sent))
    options = ["train", "--workers", "2", "--patience", "2", "--out", "run"]
    process = Program([tmp_path / "program.py", *options], tmp_path)
    _, err = process.communicate(timeout=300)
    assert process.returncode == 1
    assert re.fullmatch(
        rf"paceline: worker [01] {words}; nothing of the run was written yet: start it again\n", err
    )


def test_a_process_is_stopped_only_while_it_is() -> None:
    process = subprocess.Popen(["sleep", "60"])
    try:
        detector = FailureDetector(0.3, 0.05)

        def look() -> None:
            check_stopped(detector, {3: process}, time.monotonic(), "end")

        def look_for_long() -> None:
            deadline = time.monotonic() + 400
            while time.monotonic() < deadline:
                look()
                time.sleep(0.05)

        look()
        process.send_signal(signal.SIGSTOP)
        with pytest.raises(WorkerError, match="worker 3 has been stopped, as by SIGSTOP, for 0 s; end"):
            look_for_long()
        process.send_signal(signal.SIGCONT)
        while psutil.Process(process.pid).status() == psutil.STATUS_STOPPED:
            time.sleep(0.01)
        look()
    finally:
        process.kill()
        process.wait()
    look()  # others see that it is dead


@pytest.mark.parametrize("value", ["0", "-3", "nan"])
def test_patience_is_checked_before_any_worker_starts(value: str, tmp_path: Path) -> None:
    assert_refused(
        paceline("train", "--patience", value, "--out", tmp_path / "run"),
        "expected a positive number of seconds",
    )
