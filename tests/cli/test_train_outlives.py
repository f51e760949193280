"""What a training run outlives: its reader, a report that cannot be written. And what it leaves on the screen."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from paceline.runs import read
from support.events import until
from support.forks import Program
from support.guarantees import guarantee
from support.trainings import session_of

pytestmark = pytest.mark.processes

SECONDS = 300.0  # only a hang takes as long, however busy the machine is
OPTIONS = ["train", "--workers", "2", "--steps", "3", "--policy", "equal", "--out", "run"]
TRAIN = [sys.executable, "-m", "paceline", *OPTIONS]
# Stands for Triton: at its end, an interpreter that loaded it says what is still there. Workers never end that way.
# The server is to load its last module itself.
TORN_DOWN = """
import atexit, os, sys

here = os.getpid()
sys.modules.pop("paceline.train.forked", None)
atexit.register(lambda: os.getpid() == here and print("leaked", *sys.orig_argv, file=sys.stderr))
"""


def ended_well(words: Sequence[object], place: Path, **options: Any) -> str:
    """What such a program printed, which had no complaint."""
    process = Program(words, place, **options)
    out, err = process.communicate(timeout=SECONDS)
    assert (process.returncode, err) == (0, "")
    return out


@guarantee(
    "A run continues if the reader of its output ends; a report that cannot be written does not make a "
    "finished run fail."
)
def test_run_outlives_the_reader_of_its_output(tmp_path: Path, warm: None) -> None:
    ours, theirs = os.pipe()
    os.close(ours)
    done = subprocess.run(
        TRAIN, cwd=tmp_path, stdout=theirs, stderr=subprocess.PIPE, text=True, timeout=SECONDS
    )
    os.close(theirs)
    assert done.returncode == 0, done.stderr
    assert done.stderr == "paceline: the output has no reader any more; the run continues without it\n"
    assert read(tmp_path / "run").summary["steps"] == 3


@guarantee(
    "A run continues if the reader of its output ends; a report that cannot be written does not make a "
    "finished run fail."
)
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
    out = ended_well([program, *OPTIONS], tmp_path)
    assert "cannot write run/trace.json: Is a directory" in out
    assert "the run is complete, and paceline report makes it again" in out
    assert "Report: run/report.html" in out
    assert (tmp_path / "run" / "report.html").exists()


@guarantee(
    "A shell that allows fewer open files than the workers need causes one error before anything starts."
)
@pytest.mark.parametrize("elastic", ["--elastic", "--no-elastic"])
def test_a_shell_that_allows_too_few_files_ends_no_run_in_a_hang(tmp_path: Path, elastic: str) -> None:
    words = ["-m", "paceline", *OPTIONS, elastic]
    process = Program(words, tmp_path, limits={resource.RLIMIT_NOFILE: 32})
    _, err = process.communicate(timeout=SECONDS)
    assert process.returncode == 2
    assert err == (
        "paceline: each of 2 workers may have 32 files and connections open: expected 48 or more; raise it with "
        "ulimit -n\n"
    )
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("elastic", ["--elastic", "--no-elastic"])
def test_as_many_files_as_are_asked_for_are_enough(tmp_path: Path, elastic: str) -> None:
    words = ["-m", "paceline", *OPTIONS, elastic, "--loader-workers", "1"]
    ended_well(words, tmp_path, limits={resource.RLIMIT_NOFILE: 80})


def test_modules_of_the_workers_server_print_nothing(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(TORN_DOWN)
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    process = Program(["-m", "paceline", *OPTIONS], tmp_path, {"PYTHONPATH": path})
    until(lambda: not session_of(process))
    _, err = process.communicate(timeout=SECONDS)
    assert process.returncode == 0, err
    assert "leaked" in err  # of the command and of the tracker of resources
    assert "forkserver" not in err
