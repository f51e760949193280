"""``paceline train`` by itself: it goes on when workers are lost, and ends where an error would come again."""

from __future__ import annotations

import json
import signal
import time
from pathlib import Path

import pytest

from paceline.runs import read
from paceline.train import launch
from support.events import until
from support.forks import Program
from support.guarantees import guarantee
from support.trainings import rounds, session_of, workers_of

pytestmark = pytest.mark.processes

SECONDS = 300.0  # only a hang takes as long, however busy the machine is
# Each worker writes down its number, and one of them fails as soon as there is a checkpoint.
PROGRAM = """
import os

from paceline.torch import peers
from paceline.train import engine

read, pid = engine.ImageSet.__getitems__, os.getpid()

def fails(self, indices):
    assert os.getpid() == pid, "no loader's process is asked for"
    if peers.rank() == 1 and os.path.exists("run/checkpoint.pt"):
        raise ValueError("no such sample")
    return read(self, indices)

engine.ImageSet.__getitems__ = fails
if __name__ == "__main__":
    from paceline.cli import main

    main()
else:
    with open("started", "a") as file:
        file.write(f"{pid}\\n")
"""


def start(place: Path, *command: str) -> Program:
    return Program([*command, "--out", "run"], place)


@pytest.mark.parametrize(
    ("error", "killed"),
    [
        (RuntimeError("DataLoader worker (pid 5) is killed by signal: Killed."), True),
        (RuntimeError("DataLoader worker (pid(s) 5) exited unexpectedly"), True),
        (ConnectionResetError(104, "Connection reset by peer"), True),
        (EOFError(), True),
        (ConnectionResetError("Caught ConnectionResetError in DataLoader worker process 0."), False),
        (RuntimeError("Caught RuntimeError in DataLoader worker process 0."), False),
        (ValueError("a sample is damaged"), False),
    ],
)
def test_a_killed_loader_is_a_loss_and_an_error_of_the_data_set_is_none(
    error: Exception, killed: bool
) -> None:
    assert launch._loader_killed(error) is killed


@guarantee(
    "`paceline train` without options continues after killed and stopped workers and loaders, and leaves no "
    "process."
)
def test_run_continues_after_lost_workers_and_loaders(tmp_path: Path) -> None:
    process = start(
        tmp_path, "-m", "paceline", "train", "--workers", "3", "--slowdown-ms", "1,1,1", "--steps", "70",
        "--policy", "equal", "--loader-workers", "1", "--json", "figures.json",
    )  # fmt: skip
    until(lambda: rounds(tmp_path / "run") >= 5, process)
    first, second, third = workers_of(process)
    first.send_signal(signal.SIGKILL)
    until(lambda: rounds(tmp_path / "run") >= 15, process)
    second.children()[0].send_signal(signal.SIGKILL)  # one of its loader's, as where memory is short
    until(lambda: rounds(tmp_path / "run") >= 25, process)
    third.send_signal(signal.SIGSTOP)
    out, err = process.communicate(timeout=SECONDS)
    assert (process.returncode, err) == (0, ""), (out, err)
    until_ended = time.monotonic() + SECONDS
    while session_of(process):
        assert time.monotonic() < until_ended
        time.sleep(0.02)
    for words in (
        "worker 0 was killed by SIGKILL in round",
        "worker 1: a process of its loader was killed (",
        "worker 1 was killed by SIGKILL in round",
        "worker 2 gave no heartbeat for 1 s in round",
        "joined at round",
    ):
        assert words in out, out
    assert json.loads((tmp_path / "figures.json").read_text())["workers_lost"] == 3
    run = read(tmp_path / "run")
    assert run.round.tolist() == list(range(70))
    assert set(run.loads.sum(1).tolist()) == {256, 1500 % 256}


@guarantee(
    "A worker that raises an error ends `paceline train` with its name and the error; no replacement is "
    "started."
)
def test_worker_that_raises_ends_the_run_without_retry(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    options = ["--workers", "3", "--policy", "equal", "--checkpoint-every", "4"]
    process = start(tmp_path, str(tmp_path / "program.py"), "train", *options)
    out, err = process.communicate(timeout=SECONDS)
    assert process.returncode == 1, out
    newest = read(tmp_path / "run").round[-1]
    assert newest >= 3
    assert err.strip().splitlines()[-1] == (
        f"paceline: worker 1 failed after round {newest}: ValueError: no such sample; the other workers were ended; "
        "continue from the last checkpoint with --resume run"
    )
    assert "Traceback" not in err
    assert "finished steps are on record in run" in out
    assert (tmp_path / "started").read_text().count("\n") == 3, "nobody was started in place of another"
