"""``paceline verify``: a script under torchrun, and mistakes, each of which gets a sentence."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from paceline.verify.command import failure
from support.commands import assert_refused, assert_refused_at_last, paceline

PROGRAM = Path(__file__).with_name("program.py")
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node")


@pytest.mark.nightly  # the commands below and test_programs.py go through all its parts
@pytest.mark.processes
@pytest.mark.usefixtures("warm")
def test_a_script_under_torchrun_is_verified(tmp_path: Path) -> None:
    given = ("--steps", 2, "--json", tmp_path / "v.json", "--", *TORCHRUN, 2, PROGRAM, "draws")
    said = paceline("verify", *given)
    assert said.status == 0, said.stderr
    assert said.stdout.startswith("exact to ")
    assert "run 5 of 5: one rank" in said.stderr
    found = json.loads((tmp_path / "v.json").read_text())
    assert found["exact"] is True
    assert [run["loads"] for run in found["runs"]] == [[8, 16], [0, 24], [24, 0]]


@pytest.mark.nightly  # test_programs.py finds this program, too
@pytest.mark.processes
@pytest.mark.usefixtures("warm")
def test_loads_of_the_command_line_are_run_and_the_status_is_1_for_another_model() -> None:
    said = paceline("verify", "--steps", 2, "--loads", "4/20", "--", *TORCHRUN, 2, PROGRAM, "center")
    assert said.status == 1, said.stderr
    assert said.stdout.startswith("not exact with loads 4/20: from step ")


@pytest.mark.processes
@pytest.mark.usefixtures("warm")
@pytest.mark.parametrize(
    ("ranks", "form", "words"),
    [
        (2, "broken", "equal loads: the program failed: RuntimeError: the data are not there ("),
        (1, "draws", "the program runs on 1 rank; expected at least 2"),
    ],
)
def test_program_that_cannot_be_verified_gets_the_reason(ranks: int, form: str, words: str) -> None:
    assert_refused_at_last(paceline("verify", "--", *TORCHRUN, ranks, PROGRAM, form), words)


@pytest.mark.processes
@pytest.mark.usefixtures("warm")
def test_loads_for_another_number_of_ranks_are_refused_in_the_first_run() -> None:
    said = paceline("verify", "--steps", 2, "--loads", "8/8/8", "--", *TORCHRUN, 2, PROGRAM, "center")
    words = "--loads 8/8/8: expected 2 numbers, one for each rank, with the sum 24"
    assert_refused_at_last(said, words)


def test_wrong_commands_get_one_error(tmp_path: Path) -> None:
    run = ("--", sys.executable, "-c", "print('trained')")
    assert_refused(paceline("verify", "--", "no-such-command"), "no-such-command: no such command")
    assert_refused(paceline("verify", "--steps", 0, *run), "--steps=0: expected a whole number")
    assert_refused(paceline("verify", "--tolerance", 0, *run), "--tolerance=0.0: expected a number above 0")
    assert_refused(
        paceline("verify", "--against", "no-such-command", *run), "no-such-command: no such command"
    )
    assert_refused(paceline("verify", "--loads", "8", *run), "--loads 8: expected samples of each rank")
    assert_refused(paceline("verify", "--json", tmp_path, *run), "it is a directory")
    assert_refused_at_last(
        paceline("verify", *run), "the program made no Pace on this machine; expected a ported"
    )
    missing = paceline("verify", "--", sys.executable, tmp_path / "train.py")
    assert_refused_at_last(missing, "the program ended with status 2")
    assert "No such file" in missing.stderr


@pytest.mark.processes
@pytest.mark.usefixtures("warm")
def test_a_schedule_that_is_not_the_unported_programs_is_found() -> None:
    before = " ".join(map(str, (*TORCHRUN, 2, PROGRAM, "unported")))
    said = paceline("verify", "--steps", 2, "--against", before, "--", *TORCHRUN, 2, PROGRAM, "hurried")
    assert said.status == 1, said.stderr
    assert said.stdout.startswith(
        "another schedule than the unported program's: lr of parameter group 0 at step 2 is 0.00333333, and 0.005 in"
    )


@pytest.mark.nightly
@pytest.mark.processes
@pytest.mark.usefixtures("warm")
def test_a_killed_command_leaves_no_ranks() -> None:
    """With SIGKILL, so that it can end nobody itself."""
    command = (
        "-m",
        "paceline",
        "verify",
        "--steps",
        "10000",
        "--",
        *map(str, (*TORCHRUN, 2, PROGRAM, "draws")),
    )
    verify = subprocess.Popen(
        [sys.executable, *command],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    below: list[psutil.Process] = []
    while len(below) < 3:  # the launcher and its ranks
        assert verify.poll() is None
        below = psutil.Process(verify.pid).children(recursive=True)
        time.sleep(0.02)
    verify.kill()
    verify.wait()
    _, left = psutil.wait_procs(below, timeout=400)
    assert not left


def test_the_programs_own_error_is_found_in_its_output() -> None:
    lines = [
        "W1127 some warning\n",
        "[rank1]: Traceback (most recent call last):\n",
        '[rank1]:   File "/home/me/train.py", line 12, in main\n',
        "[rank1]: ValueError: no data\n",
        "torch.distributed.elastic.multiprocessing.errors.ChildFailedError:\n",
    ]
    assert failure(lines, 1) == "the program failed: ValueError: no data (/home/me/train.py, line 12)"
    missing = "/usr/bin/python3: can't open file '/home/me/trian.py': [Errno 2] No such file or directory"
    assert failure([missing, "=" * 20], 1) == f"the program ended with status 1: {missing[18:]}"
    assert failure(["usage: train.py\n", "\n"], 2) == "the program ended with status 2: usage: train.py"
    usage = "train.py: error: the following arguments are required: --lr\n"
    lines = [
        "usage: train.py --lr LR\n",
        usage,
        "python: noise\n",
        "traceback : To enable traceback see: https://x\n",
    ]
    assert failure(lines, 1) == f"the program ended with status 1: {usage[17:-1]}"
    assert failure([], 9) == "the program ended with status 9"
