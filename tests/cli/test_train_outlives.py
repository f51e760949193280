"""What a training run outlives: its reader, a report that cannot be written. And what it leaves on the screen."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from paceline.runs import read

pytestmark = [pytest.mark.processes, pytest.mark.xdist_group("cli")]

SECONDS = 300.0  # only a hang takes as long, however busy the machine is
TRAIN = [
    sys.executable,
    "-m",
    "paceline",
    "train",
    "--workers",
    "2",
    "--steps",
    "3",
    "--policy",
    "equal",
    "--out",
    "run",
]
# Stands for Triton: at its end, an interpreter that loaded it says what is still there. Workers never end that way.
TORN_DOWN = """
import atexit, os, sys

if "forkserver" in " ".join(sys.orig_argv):
    server = os.getpid()
    atexit.register(lambda: os.getpid() == server and print("leaked", file=sys.stderr))
"""


def test_a_run_outlives_whoever_reads_its_output(tmp_path: Path) -> None:
    ours, theirs = os.pipe()
    os.close(ours)
    done = subprocess.run(
        TRAIN, cwd=tmp_path, stdout=theirs, stderr=subprocess.PIPE, text=True, timeout=SECONDS
    )
    os.close(theirs)
    assert done.returncode == 0, done.stderr
    assert done.stderr == "paceline: nobody reads the output any more; the run goes on without it\n"
    assert read(tmp_path / "run").summary["steps"] == 3


def test_a_finished_run_whose_trace_cannot_be_written_has_not_failed(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    # A directory of that name is in the way as soon as the run has begun.
    program = tmp_path / "program.py"
    program.write_text(
        "from pathlib import Path\n"
        "from paceline.cli import main, training\n"
        "summed, made = training.Session._sum_up, Path('run/trace.json')\n"
        "training.Session._sum_up = lambda *given: (made.mkdir(), summed(*given))\n"
        "if __name__ == '__main__':\n"
        "    main()\n"
    )
    done = subprocess.run(
        [sys.executable, "program.py", *TRAIN[3:]],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "cannot write run/trace.json: Is a directory" in done.stdout
    assert "the run is complete, and paceline report makes it again" in done.stdout
    assert "Report: run/report.html" in done.stdout
    assert (tmp_path / "run" / "report.html").exists()


@pytest.mark.parametrize("elastic", ["--elastic", "--no-elastic"])
def test_a_shell_that_allows_too_few_files_ends_no_run_in_a_hang(tmp_path: Path, elastic: str) -> None:
    done = subprocess.run(
        [*TRAIN, elastic], cwd=tmp_path, capture_output=True, text=True, timeout=SECONDS,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (32, 32)),
    )  # fmt: skip
    assert done.returncode == 2
    assert done.stderr == (
        "paceline: each of 2 workers may have 32 files and connections open: expected 48 or more; raise it with "
        "ulimit -n\n"
    )
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("elastic", ["--elastic", "--no-elastic"])
def test_as_many_files_as_are_asked_for_are_enough(tmp_path: Path, elastic: str) -> None:
    done = subprocess.run(
        [*TRAIN, elastic, "--loader-workers", "1"],
        cwd=tmp_path, capture_output=True, text=True, timeout=SECONDS,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (80, 80)),
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")


def test_nothing_is_said_of_what_the_workers_server_had_loaded(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(TORN_DOWN)
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        TRAIN,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=SECONDS,
        env=os.environ | {"PYTHONPATH": path},
    )
    assert (done.returncode, done.stderr) == (0, "")
