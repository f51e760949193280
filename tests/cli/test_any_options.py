"""Whatever options a command is given, it answers: with what was asked for, or in a sentence, never a traceback.

The command lines are made from the options that typer itself knows of: well-formed, odd and wrong values. The
commands run in this process up to where their work would begin: training, serving and experiments are left out,
simulations are short.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import importlib
import shutil
import webbrowser
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import typer
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from typer.utils import get_params_from_function

pytest.importorskip("torch")
pytest.importorskip("fastapi")
pytest.importorskip("ray")

import paceline.cli.doctor
import paceline.cli.simulate
import paceline.cli.training
import paceline.cli.watch
import paceline.serve.app
import paceline.serve.server
import paceline.simulate.learning
import paceline.train.ray_engine
from paceline import cli, papers
from paceline.data import traces
from paceline.errors import PacelineError
from paceline.runs import Recorder
from support.commands import paceline as run_paceline

GUARANTEES = (
    "Wrong, mistyped or huge options give one message with what was perhaps meant and exit status 2; "
    "never a traceback.",
)

WHOLE = [
    "0",
    "1",
    "2",
    "3",
    "4",
    "7",
    "64",
    "-1",
    "99999",
    "4294967296",
    "99999999999999999999",
    "1e3",
    "x",
    "",
]
REAL = ["0", "1", "0.5", "1e-9", "-1", "nan", "inf", "-inf", "1e308", "1e999", "x", ""]
FILES = [
    "trace.csv", "scenario.toml", "workers.csv", "times.csv", "run", "run/run.json", "junk", "folder", "new",
    "no/such/file",
]  # fmt: skip
PLACES = ["/", ".", "-", "", "/dev/null/x", "x" * 300, "ü/\udc80"]
WORDS = [
    "equal", "level", "auto", "factoring:least=0", "level:caution=x", "dolbie:alpha=nan",
    "lbbsp:forecast=narx:inputs=6",
    "optimum", "equal,level", ",", "a=b", "digits", "mlp", "resnet18", "cnn", "loss", "hook", "torch", "ray", "mpi",
    "bsp", "asp", "ssp:2", "ssp:-1", "ssp:x", "lsp:3:5", "everyone", "static:2", "static:nan", "dbw", "push-wait",
    "pull", "fixed", "adascale", "iterated", "exact", "uniform", "weibull", "empirical",
    "1,1,4", "1,1,1,4", "nan,1,1,1", "1e300,1,1,1", "1,,1", "1:64,1:64,:,:", ":", "9:8,:,:,:", "-1:,:,:,:",
    "1:99999999999999999999,:,:,:", "100", "a=100", "a=-1", "nan", "1e300", "0", "127.0.0.1", "localhost", "::1",
    "127.0.0.1:9", "127.0.0.1:²", "no host", "²", "\x1b[31m", "ü" * 40, " ", "[red]", "dolbie", "lbbsp", "fig1",
]  # fmt: skip


class Command(NamedTuple):
    """A command: its parameters as typer made them, and their types by their names."""

    params: list[Any]
    types: dict[str, str]


def all_commands() -> dict[str, Command]:
    """Every command by its name."""
    found = {}
    for name in cli.COMMANDS:
        told = get_params_from_function(importlib.import_module(f"paceline.cli.{name}").command)
        found[name] = Command(
            typer.main.get_command(cli._app(name)).commands[name].params,
            {key: str(each.annotation) for key, each in told.items()},
        )
    return found


COMMANDS = all_commands()


@st.composite
def arguments(draw: st.DrawFn, command: Command) -> list[str]:
    """Some of a command's options and arguments in any order, with values that fit their kind, or do not."""
    options = [each for each in command.params if each.param_type_name == "option" and each.name != "help"]
    line: list[str] = []
    for option in draw(st.lists(st.sampled_from(options), max_size=5)) if options else []:
        name = draw(st.sampled_from([*option.opts, *option.secondary_opts]))
        line += [name] if option.is_flag else [name, draw(value(command.types[option.name]))]
    for argument in (each for each in command.params if each.param_type_name == "argument"):
        count = 1 if argument.nargs == 1 else draw(st.integers(0, 3))
        given = [draw(value(command.types[argument.name])) for _ in range(count)]
        if given and draw(st.integers(0, 9)):
            line = [*line, "--", *given] if draw(st.booleans()) else [*given, *line]
    return line


def value(kind: str) -> st.SearchStrategy[str]:
    """What people, and others, may write for a parameter of this type; mostly something that is meant for it."""
    own = WHOLE if "int" in kind else REAL if "float" in kind else FILES + PLACES if "Path" in kind else WORDS
    odd = st.text(st.characters(exclude_characters="\0"), max_size=8)  # no program is ever handed a NUL
    return st.one_of(*[st.sampled_from(own)] * 5, st.sampled_from(WORDS + FILES + PLACES + WHOLE + REAL), odd)


def make_files(place: Path) -> None:
    """Small files of every kind that some command reads, and some that none can."""
    speeds = np.array([[0.001, 0.002, 0.004, 0.001]] * 3)
    traces.write(place / "trace.csv", traces.Trace(speeds, np.zeros_like(speeds)))
    shutil.copy(Path(__file__).parents[2] / "examples" / "scenarios" / "mixed.toml", place / "scenario.toml")
    (place / "workers.csv").write_text("master,worker,u,a\na,p,1,0.2\na,q,2,0.1\nb,p,1,0.3\nb,q,3,0.1\n")
    times = "".join(f"{m},{w},10,{ms}\n" for m in "ab" for w in "pq" for ms in (12, 14, 13, 19, 15))
    (place / "times.csv").write_text("master,worker,rows,milliseconds\n" + times)
    (place / "junk").write_bytes(b"\x93junk\0\xff" * 20)
    (place / "folder").mkdir()
    with Recorder.create(place / "run", {"policy": "equal", "workers": 4, "engine": "torch"}) as recorder:
        for step in range(3):
            recorder.round(
                round=step, epoch=0, time=step + 1.0, seconds=1.0, batch=8, loads=[2, 2, 2, 2],
                compute=[0.2, 0.4, 1.0, 0.2], loss=1.0,
            )  # fmt: skip
        recorder.finish()


class _Server:
    def run(self, **_: Any) -> None: ...


@contextlib.contextmanager
def no_work() -> Iterator[None]:
    """Commands end where their work would begin."""

    def begun(*_: Any, **__: Any) -> Any:
        raise PacelineError("the work would begin here")

    simulated, experiments = paceline.cli.simulate.run, papers.experiments

    def shorter(scenario: Any, *rest: Any) -> Any:
        few = {"rounds": min(scenario.rounds, 3), "realizations": min(scenario.realizations, 2)}
        return simulated(dataclasses.replace(scenario, **few), *rest)

    def unperformed(paper: str) -> dict[str, Any]:
        return dict.fromkeys(experiments(paper), begun)

    # Made once: that takes longer than most commands.
    made = {name: typer.main.get_command(cli._app(name)) for name in ("", *cli.COMMANDS)}
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(cli, "_app", lambda name, helps=False: made.get(name, made[""]))
        patched.setattr(paceline.cli.training.launch, "run", begun)
        patched.setattr(paceline.train.ray_engine, "run", begun)
        patched.setattr(paceline.serve.app, "make", lambda *_: None)  # its routes take most of the time
        patched.setattr(paceline.serve.server, "run", lambda app, service, *_: asyncio.run(service.stop()))
        patched.setattr(paceline.cli.simulate, "run", shorter)
        patched.setattr(paceline.simulate.learning, "learn", begun)
        patched.setattr(paceline.cli.doctor, "observe", begun)
        patched.setattr(paceline.cli.watch, "make_server", lambda run_dir, host: _Server())
        patched.setattr(papers, "experiments", unperformed)
        patched.setattr(webbrowser, "open", lambda url: True)
        yield


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    place = tmp_path_factory.mktemp("files")
    make_files(place)
    with no_work():
        yield place


@pytest.mark.parametrize("name", COMMANDS)
@settings(max_examples=60, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_every_command_answers_any_options(
    name: str, files: Path, tmp_path: Path, data: st.DataObject
) -> None:
    line = data.draw(arguments(COMMANDS[name]))
    scratch = tmp_path / "scratch"
    shutil.rmtree(scratch, ignore_errors=True)
    shutil.copytree(files, scratch)
    with contextlib.chdir(scratch):
        said = run_paceline(name, *line)
    assert said.status in (0, 1, 2)
    assert "Traceback" not in said.stdout + said.stderr
    if said.status == 2:
        assert said.stderr.strip().splitlines()[-1].startswith("paceline: ")
