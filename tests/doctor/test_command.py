"""``paceline doctor``: a script under torchrun is watched from outside, and mistakes get a sentence."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
from pathlib import Path

import psutil
import pytest

from paceline import PacelineError, runs
from paceline.doctor.command import SEEN, _made, _tell, check_ranks, observe
from support.commands import assert_refused, assert_refused_at_last, paceline
from support.forks import as_torchrun
from support.guarantees import guarantee

REFUSES = guarantee(
    "The doctor refuses a command of one process, and ends a training of which it sees nothing after 200 "
    "steps, with the reason."
)

SCRIPT = Path(__file__).with_name("plain.py")
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node")


@pytest.fixture
def one_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """What ranks on this machine are to have set."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


@guarantee(
    "The doctor keeps all parameters bit for bit and the program's own hooks; its failure does not end the "
    "training."
)
@pytest.mark.processes
@pytest.mark.usefixtures("one_machine", "warm")
def test_a_script_under_torchrun_is_watched_and_ended(tmp_path: Path) -> None:
    """Also one whose first parameter is frozen, and whose wrapper is in evaluation's mode."""
    kept = tmp_path / "kept"
    said = paceline(
        *("doctor", "--steps", 14, "--out", kept, "--json", tmp_path / "d.json", "--policy", "level"),
        *("--", *TORCHRUN, 2, SCRIPT, 100_000, "frozen"),
    )
    assert said.status == 0, said.stderr
    assert "Rank 1 takes" in said.stdout
    assert "pace = paceline.torch.Pace(ddp, global_batch=2 * batch_size)" in said.stdout
    assert "paceline verify -- " in said.stdout
    assert "trained step 0\n" in said.stderr, "what the training prints is passed on"
    assert "Traceback" not in said.stderr, "that it was ended from here is not shown as a fault"
    found = json.loads((tmp_path / "d.json").read_text())
    assert found["take"] == "level"
    assert found["steps"] == 12
    assert len(runs.read(kept).round) == 12
    assert paceline("whatif", kept, "--policy", "level").status == 0


@REFUSES
@pytest.mark.processes
@pytest.mark.usefixtures("one_machine", "warm")
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((5,), "the command ended after 5 of at least 10 optimizer steps; let it train for longer"),
        ((100_000, "another"), "came after a backward pass through the watched module, which is the first"),
        ((0,), "made no step of a torch.optim optimizer"),
    ],
)
def test_reason_why_nothing_was_seen_is_reported(arguments: tuple[object, ...], words: str) -> None:
    said = paceline("doctor", "--steps", 20, "--", *TORCHRUN, 2, SCRIPT, *arguments)
    assert_refused_at_last(said, words)
    assert ("train for longer" in said.stderr) != (len(arguments) > 1), "it trains for long already"


def test_count_of_steps_is_whole_at_every_moment(tmp_path: Path) -> None:
    """The command may be ended while it writes; an empty file would say that it made no step."""
    (tmp_path / SEEN).touch()
    _tell(tmp_path, 1)
    writes = threading.Thread(target=lambda: [_tell(tmp_path, made) for made in range(1, 5001)])
    writes.start()
    found = [1]
    while writes.is_alive():
        found.append(_made(tmp_path))
    writes.join()
    assert found == sorted(found)
    assert _made(tmp_path) == 5000


@REFUSES
@pytest.mark.processes
@pytest.mark.usefixtures("warm")
def test_one_process_alone_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    for name, value in as_torchrun(1)[0].items():
        monkeypatch.setenv(name, value)
    said = paceline("doctor", "--", sys.executable, SCRIPT, 100_000)
    assert_refused_at_last(said, "1 rank: expected at least 2")
    assert said.stderr.count("trained step") < 100, "it ended before the training did"


@REFUSES
@pytest.mark.parametrize(
    "command",
    [
        TORCHRUN[:-2],
        (*TORCHRUN[:3], "--nproc_per_node=1", "--nnodes", 1),
        ("/opt/bin/torchrun", "--nnodes=1:1", "--nproc-per-node", 1),
    ],
)
def test_torchrun_of_one_rank_is_refused_before_it_starts(command: tuple[object, ...]) -> None:
    with pytest.raises(PacelineError, match="torchrun starts 1 rank here: expected at least 2"):
        check_ranks([*map(str, command), str(SCRIPT)])


def test_launchers_of_several_or_unknown_ranks_are_accepted() -> None:
    for command in (
        (*TORCHRUN, 2),
        (*TORCHRUN[:3], "--nproc-per-node=gpu"),
        (*TORCHRUN[:3], "--nnodes", 2),
        ("mpirun", "-n", 1, "train.py"),
    ):
        check_ranks([*map(str, command), str(SCRIPT)])


STOPS = guarantee(
    "Ctrl-C in `paceline doctor` reports the steps on record; killed with SIGKILL, it leaves no rank."
)


def started(*options: object, kind: str, until: str) -> tuple[subprocess.Popen[str], list[psutil.Process]]:
    """A doctor of a training that goes on, once that has printed so much, and the processes below it."""
    command = ("--steps", 10_000, *options, "--", *TORCHRUN, 2, SCRIPT, 100_000, kind)
    doctor = subprocess.Popen(
        [sys.executable, "-m", "paceline", "doctor", *map(str, command)],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    assert doctor.stderr is not None
    assert any(line.startswith(until) for line in doctor.stderr)
    return doctor, psutil.Process(doctor.pid).children(recursive=True)


@STOPS
@pytest.mark.processes
@pytest.mark.usefixtures("one_machine", "warm")
@pytest.mark.parametrize("steps", [0, 14])
def test_ctrl_c_reports_what_was_watched(steps: int, tmp_path: Path) -> None:
    """The first report of the ranks is on record after 10 steps; without one there is nothing to report."""
    options = ("--policy", "level", "--out", tmp_path / "kept")
    doctor, below = started(*options, kind=f"until{steps}", until=f"trained step {steps}\n")
    doctor.send_signal(signal.SIGINT)
    assert doctor.stdout is not None
    assert doctor.stderr is not None
    error, out = doctor.stderr.read(), doctor.stdout.read()
    doctor.wait(timeout=400)
    _, left = psutil.wait_procs(below, timeout=400)
    assert not left
    if steps:
        assert doctor.returncode == 0, error
        assert "interrupted: the report is of 8 steps" in error
        assert "Rank 1 takes" in out
        assert len(runs.read(tmp_path / "kept").round) == 8
    else:
        assert doctor.returncode == 130
        assert "Traceback" not in error


def test_report_of_a_command_that_failed_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("paceline.doctor.command._play", lambda *_: 3)
    monkeypatch.setattr("paceline.doctor.command._rounds", lambda place: 30)
    monkeypatch.setattr("paceline.doctor.command._read", lambda place, status: (place, status))
    observe([sys.executable, "train.py"], 64, False, lambda done, of: None)
    assert capsys.readouterr().err == "the command ended with status 3: the report is of 30 steps\n"


@STOPS
@pytest.mark.processes
@pytest.mark.usefixtures("one_machine", "warm")
def test_a_killed_doctor_leaves_no_ranks() -> None:
    """With SIGKILL, so that it can end nobody itself."""
    doctor, below = started(kind="quiet", until="trained step")
    assert len(below) >= 3, "torchrun and its ranks"
    doctor.kill()
    doctor.communicate()
    _, left = psutil.wait_procs(below, timeout=400)
    assert not left


def test_commands_that_show_nothing(tmp_path: Path) -> None:
    assert_refused(paceline("doctor", "--", "no-such-command"), "no-such-command: no such command")
    assert_refused(
        paceline("doctor", "--steps", 2, "--", sys.executable, "-V"),
        "--steps=2: expected a whole number, 10 to",
    )
    assert_refused(paceline("doctor", "--out", tmp_path.parent, "--", sys.executable, "-V"), "exists")
    command = ("--", sys.executable, "-c", "print('trained')")
    for options, sentence in (
        (("--policy", "fastest"), "policy 'fastest' is unknown"),
        (("--json", tmp_path / "no" / "d.json"), "the folder .* does not exist"),
        (("--json", tmp_path), "it is a directory"),
        (("--out", Path(__file__) / "run"), "is not a directory"),
    ):
        refused = paceline("doctor", *options, *command)
        assert_refused(refused, sentence)
        assert "trained" not in refused.stderr, "the training was started all the same"
    nothing = paceline("doctor", "--", sys.executable, "-c", "print('hello')")
    assert "hello\n" in nothing.stderr
    assert_refused_at_last(nothing, "made no DistributedDataParallel module")
    failed = paceline("doctor", "--", sys.executable, "-c", "raise SystemExit(7)")
    assert failed.status == 1
    assert "ended with status 7" in failed.stderr


@guarantee(
    "The doctor names the rank that is last in most steps, and what part of the waiting is due to long "
    "samples, if it can be known."
)
@pytest.mark.processes
@pytest.mark.usefixtures("one_machine", "warm")
def test_waiting_for_long_samples_is_distinguished_from_waiting_for_a_slow_rank(tmp_path: Path) -> None:
    """Rank 1 is a sixth slower, and the lengths of the texts make much larger differences, in each step others."""
    script = SCRIPT.with_name("texts.py")
    said = paceline("doctor", "--steps", 26, "--json", tmp_path / "d.json", "--", *TORCHRUN, 2, script, 1000)
    assert said.status == 0, said.stderr
    found = json.loads((tmp_path / "d.json").read_text())["answer"]["causes"]
    assert found["data"] > 0.6
    assert found["data"] > found["speeds"] > 0.03
    whole = " ".join(said.stdout.split())
    assert f"{100 * found['data']:.0f} % of the waiting is due to your samples' lengths" in whole
    assert "rank 1" in whole
    assert "pace.loader(dataset, cost=lengths), see docs/samples.md" in whole
