"""What ``paceline train`` says first, what its help says, and what it takes a mistyped word for."""

from __future__ import annotations

import functools
import os
import pty
import re
import subprocess
import sys
from pathlib import Path

import pytest

from paceline import policies
from paceline.cli import COMMANDS
from paceline.cli.output import ProgressDisplay
from paceline.cli.training import show
from support.commands import assert_refused, installs, paceline, python
from support.guarantees import guarantee

WITHOUT = """
import sys
sys.modules.update(dict.fromkeys(["numpy", "scipy", "torch"]))  # as if they were not installed
from paceline.cli import run
sys.exit(run(["train", "--policy", "level"]))
"""


def on_a_terminal(arguments: list[str], place: Path) -> tuple[int, str]:
    """Exit status and all that the screen got, of a program that runs on a terminal."""
    ours, theirs = pty.openpty()
    started = subprocess.Popen(
        [sys.executable, *arguments], cwd=place, stdin=theirs, stdout=theirs, stderr=theirs, close_fds=True,
        env=os.environ | {"TERM": "xterm", "COLUMNS": "80"},
    )  # fmt: skip
    os.close(theirs)
    said = b""
    try:
        while some := os.read(ours, 4096):
            said += some
    except OSError:  # of Linux, where nobody writes any more
        pass
    os.close(ours)
    return started.wait(timeout=400), said.decode()


@guarantee(
    "A command says that PyTorch is loading before it loads it; `--help` and `--version` load no command."
)
def test_terminal_shows_at_once_that_pytorch_loads(tmp_path: Path) -> None:
    status, said = on_a_terminal(["-c", WITHOUT], tmp_path)
    *first, rest = said.split("\r\x1b[K")
    assert first == ["Loading ...", "Loading PyTorch ..."], "before anything that takes its time to load"
    assert status == 2
    assert re.search(f"is not installed; {installs('torch')}", " ".join(rest.split()))
    assert "Watch" not in rest
    assert not list(tmp_path.iterdir())


@guarantee(
    "A command says that PyTorch is loading before it loads it; `--help` and `--version` load no command."
)
@pytest.mark.parametrize("asked", [["--version"], ["--help"], []], ids=["version", "help", "nothing"])
def test_what_asks_for_no_command_loads_none(asked: list[str], tmp_path: Path) -> None:
    code = WITHOUT.replace('["train", "--policy", "level"]', str(asked))
    done = python(code, place=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    if asked != ["--version"]:
        assert all(f" {name} " in done.stdout for name in COMMANDS)
        assert "Train a model on uneven workers, at the pace of all of them." in " ".join(done.stdout.split())


@guarantee(
    "Wrong, mistyped or huge options give one message with what was perhaps meant and exit status 2; never a "
    "traceback."
)
@pytest.mark.parametrize(
    "wrong", ["--model nosuch", "--policy nosuch", "--weigh nosuch", "--data nosuch", "--workers 0"]
)
def test_error_comes_before_how_to_watch(wrong: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    done = paceline("train", *wrong.split())
    assert done.status == 2
    assert done.stdout == ""


def test_help_has_its_options_in_panels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    said = paceline("train", "--help").stdout
    panels = [
        *("Options", "More on data and training", "More on balancing", "More on played slowness"),
        *("Figures and checkpoints", "Workers that are lost or join", "With --engine ray"),
    ]
    places = [said.index(f"─ {panel} ─") for panel in panels]
    assert sorted(places) == sorted(set(places))
    first = re.findall(r"^│ --([a-z-]+)", said[places[0] : min(places[1:])], re.MULTILINE)
    assert first[:10] == ["data", "model", "workers", "policy", "global-batch", "epochs", *first[6:10]]
    assert set(first[6:]) == {"slowdown", "compare", "out", "resume", "help"}
    assert places[6] < said.index("--backup")
    for name in policies.names():
        if policies.POLICIES[name].needs_upcoming:
            assert f"{name}: " not in said  # only simulations know the next round
            continue
        assert re.search(rf"^ +{name}: ", said, re.MULTILINE), name


@guarantee(
    "Wrong, mistyped or huge options give one message with what was perhaps meant and exit status 2; never a "
    "traceback."
)
@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("train --policy levle", r"policy 'levle' is unknown; did you mean level\? Expected one of abs, ata, auto"),
        ("train --policy level:forcast=ema", r"has no option 'forcast=ema'; did you mean forecast\?"),
        ("train --slow 1", r"train has no option --slow; did you mean --slowdown .*\? See paceline train --help"),
        ("train --model resnet", r"model 'resnet' is unknown; did you mean resnet18\?"),
        ("train --engine rya", r"engine 'rya' is unknown; did you mean ray\? Expected one of torch, ray"),
        ("train --weigh hok", r"expected 'loss' or 'hook'; did you mean hook\?"),
        ("plan w.csv --rows 10 --assign exat", r"probabilistic; did you mean exact\?"),
        ("reproduce dolbi", r"expected one of dolbie, .*; did you mean dolbie\?"),
        ("trian", r"No such command 'trian'; did you mean 'train'\?"),
        ("serve --prot 1", r"serve has no option --prot; did you mean --port\?"),
        ("serve --cost x", r"--cost 'x': expected one of 'sum', 'padded'; see paceline serve --help"),
        ("doctor --steps -- true", r"--steps '--': expected a whole number; see paceline doctor --help"),
        ("plan w.csv --rows 10 --deadline -- x", r"--deadline '--': expected a number; see paceline plan --help"),
    ],
)  # fmt: skip
def test_mistyped_word_gets_a_suggestion(
    line: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "w.csv").write_text("master,worker,u,a\nA,w,0.5,0.2\n")
    assert_refused(paceline(*line.split()), words)


def test_workers_are_counted_while_they_start() -> None:
    counter = ProgressDisplay("level")
    counter.begin(0, 12, "starting workers")
    shown = functools.partial(show, counter)
    shown({"type": "starting", "ready": 2, "workers": 4})
    task = counter._bar.tasks[0]
    assert (task.total, task.fields["note"]) == (12, "starting workers 2/4")
    shown({"type": "start", "first": 3, "rounds": 12})
    assert (task.completed, task.fields["note"]) == (3, "")
