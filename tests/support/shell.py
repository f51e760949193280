"""The commands of a page's ``bash`` blocks: run where that takes seconds, else held against the real options.

``paceline ...`` is run with ``SHORTER``'s options added, ``curl`` by bash against a ``paceline serve`` of its own.
A ``torchrun`` of several nodes starts all of them on this machine if the page made the program: sleeping a tenth of
what is said, for the first time by torchrun itself, and then in processes that have PyTorch loaded. ``NOT_RUN`` names
the commands that are only checked, and why: their options are parsed by the program's own parser; the files, extras
and targets that they name exist. Any other command fails.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import io
import os
import re
import runpy
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from paceline import cli
from support import served
from support.commands import paceline
from support.forks import Program, all_well, as_torchrun
from support.ports import free_port

ROOT = Path(__file__).resolve().parents[2]

# Options added to what a page says, so that it takes seconds; the last one given counts.
SHORTER = {
    "train": ["--epochs", "1", "--steps", "4"],
    "simulate": ["--rounds", "12", "--realizations", "2"],
    "simulate --learn": ["--rounds", "12"],
    "reproduce": ["--quick"],
}
# Commands that are checked and not run, by their first words, and the reason.
NOT_RUN = {
    "paceline reproduce": "takes minutes; tests/papers runs each experiment",  # `--list` is run
    "paceline train --data mnist": "needs files that users bring",
    "paceline watch": "serves until it is ended; tests/test_printed.py runs it",
    "paceline serve": "serves until it is ended; tests/test_printed.py runs it",
    "paceline doctor": "watches a script of the reader's; tests/doctor and tests/test_printed.py run it",
    "paceline verify": "runs a script of the reader's; tests/verify and tests/test_printed.py run it",
    "python benchmarks/": "takes minutes",
    "python docs/pictures/": "takes minutes",
    "python examples/": "tests/examples runs the examples",
    "python tests/": "takes minutes",
    "torchrun": "tests/examples runs the examples; programs that a page made are run on several nodes",
    "make": "installs packages; .ci/run runs its targets",
    "pip install": "fetches packages; tests/test_wheel.py installs the wheel with each extra",
    "git clone": "fetches a program of others",
    "git checkout": "is of a program of others",
    "sed": "edits a program of others",
    "patch": "edits a program of others; tests/test_printed.py applies the doctor's change",
    "cd": "changes the reader's shell",
}


class Shell:
    """One page's shell: variables that it exported, and nodes that wait for the others."""

    def __init__(self) -> None:
        self._exported: dict[str, str] = {}
        self._nodes: list[tuple[list[str], dict[str, str]]] = []
        self._launched = False
        self._fetched = False  # whether the page fetches programs of others, which are not there

    def run(self, block: str) -> None:
        """Run or check each command of a block, in the working directory; AssertionError says what is wrong."""
        if re.search(r"\bcurl\b", block):
            self._curl(block)
            return
        for words in commands(block):
            given = dict(self._exported)
            if words[0] == "export":
                self._exported |= dict(word.split("=", 1) for word in words[1:])
                continue
            while words and re.match(r"\w+=", words[0]):  # NAME=value before a command
                key, value = words.pop(0).split("=", 1)
                given[key] = value
            if words[0] == "torchrun":
                self._torchrun(words[1:], given)
            else:
                self._fetched |= words[:2] == ["git", "clone"]
                check(words)

    def _curl(self, block: str) -> None:
        """Run the block as it is, by bash, against a service that was just started."""
        with served.process(Path("served").absolute(), "--batch", "256", "--workers", "1") as service:
            done = subprocess.run(
                ["bash", "-euo", "pipefail", "-c", block.replace("http://127.0.0.1:7070", service.url)],
                env=os.environ | {"PACELINE_TOKEN": served.TOKEN},
                capture_output=True,
                text=True,
                timeout=400,
            )
        assert done.returncode == 0, done.stdout + done.stderr

    def close(self) -> None:
        """The page is over: AssertionError for a node whose peers never came."""
        assert not self._nodes, (
            f"torchrun {shlex.join(self._nodes[0][0])}: the page has no command for its peers"
        )

    def _torchrun(self, arguments: list[str], given: dict[str, str]) -> None:
        parsed = torchrun(arguments, self._fetched)
        program, behind = parsed.training_script, parsed.training_script_args
        nodes = int(parsed.nnodes.split(":")[0])
        if parsed.module or nodes == 1 or not Path(program).is_file():
            return
        given["GLOO_SOCKET_IFNAME"] = "lo"
        given["SLEEP_MS"] = str(float(given.get("SLEEP_MS", 0)) / 10)
        self._nodes.append((arguments, given))
        if len(self._nodes) < nodes:
            return
        started, self._nodes = self._nodes, []
        if not self._launched:
            self._launched = True
            by_torchrun(started)
        else:
            assert int(parsed.nproc_per_node) == 1, "several ranks a node: run them by torchrun"
            variables = zip(as_torchrun(nodes), started, strict=True)
            all_well([told | own for told, (_, own) in variables], [program, *behind])


def by_torchrun(nodes: list[tuple[list[str], dict[str, str]]]) -> None:
    """Run these nodes' commands at once, on this machine."""
    here = {"--master-addr": "127.0.0.1", "--master-port": str(free_port())}
    running = []
    for arguments, given in nodes:
        for option, value in here.items():
            arguments[arguments.index(option) + 1] = value
        running.append(Program(["-m", "torch.distributed.run", *arguments], Path.cwd(), given))
    for node in running:
        said = node.communicate(timeout=300)
        assert node.returncode == 0, said


def commands(block: str) -> Iterator[list[str]]:
    """The commands of a block: continued lines joined, comments and background signs dropped."""
    for line in block.replace("\\\n", " ").splitlines():
        lexer = shlex.shlex(line, posix=True, punctuation_chars="&|;")
        lexer.whitespace_split = True
        part: list[str] = []
        for word in lexer:
            if set(word) <= set("&|;"):
                if part:
                    yield part
                part = []
            else:
                part.append(word)
        if part:
            yield part


def reason(words: list[str]) -> str | None:
    """The entry of ``NOT_RUN`` for a command; None if it is run."""
    line = shlex.join(words).replace("python3 ", "python ", 1)
    found = next((each for each in NOT_RUN if line.startswith(each)), None)
    return None if "--list" in words else found


def check(words: list[str], run: bool = True) -> None:
    """Run or check one command; AssertionError says what is wrong with it. run: else it is only checked."""
    line = shlex.join(words)
    match words:
        case ["paceline", *arguments]:
            parse_paceline(arguments)
            if run and reason(words) is None:
                _run_paceline(arguments, line)
        case ["python" | "python3", "-m", module, *_]:
            assert importlib.util.find_spec(module), f"{line}: no such module"
        case ["python" | "python3", program, *options]:
            _program(program, options)
        case ["torchrun", *arguments]:
            torchrun(arguments)
        case ["make", *targets]:
            rules = re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
            assert set(targets) <= set(rules), f"{line}: the Makefile has {', '.join(rules)}"
        case ["pip", "install", *packages]:
            _extras(packages)
        case _:
            assert reason(words) is not None, f"{line}: no test knows how to check this command"


def torchrun(arguments: list[str], fetched: bool = False) -> Any:
    """Torchrun's own arguments, parsed, with those of the program checked. fetched: the program is not there."""
    from torch.distributed.run import get_args_parser

    parsed = get_args_parser().parse_args(arguments)
    if parsed.module:
        assert parsed.training_script == "paceline", (
            f"torchrun -m {parsed.training_script}: expected paceline"
        )
        parse_paceline(parsed.training_script_args)
    elif not fetched:
        _program(parsed.training_script, parsed.training_script_args)
    return parsed


def _run_paceline(arguments: list[str], line: str) -> None:
    whole = {"--list", "--trace", "--resume"} & set(arguments)
    kind = arguments[0] + " --learn" * ("--learn" in arguments)
    shorter = [] if whole else list(SHORTER.get(kind, []))
    if (
        arguments[0] == "train"
        and not whole
        and not {"--workers", "--slowdown", "--slowdown-ms"} & set(arguments)
    ):
        shorter += ["--workers", "2"]
    said = paceline(*arguments, *shorter)
    assert said.status == 0, f"{line}: exit status {said.status}\n{said.stdout}\n{said.stderr}"


def parse_paceline(arguments: list[str]) -> None:
    """Hold the options against the real command's; files that must be there are looked for by ``_paceline``."""
    group = typer.main.get_command(cli._app(arguments[0]))
    name, *rest = arguments
    if name.startswith("--"):
        return
    assert name in group.commands, f"paceline {name}: expected one of {', '.join(group.commands)}"
    command = group.commands[name]
    try:
        command.make_context(name, rest)
    except typer.Exit:  # --help
        pass
    except typer.exceptions.TyperException as error:
        raise AssertionError(f"paceline {shlex.join(arguments)}: {error.format_message()}") from error


class Begun(Exception):
    """A program is about to parse its options, by ``parser``."""

    def __init__(self, parser: argparse.ArgumentParser) -> None:
        self.parser = parser


def _program(program: str, options: list[str]) -> None:
    """Have a benchmark's parser take these options; of other programs, the file exists and names them."""
    path = ROOT / program if (ROOT / program).exists() else Path(program)
    assert path.is_file(), f"python {program}: no such file"
    source = path.read_text(encoding="utf-8")
    if program.startswith("benchmarks/") and "command_line(__doc__)" in source:
        said = io.StringIO()
        try:
            with contextlib.redirect_stderr(said):
                parser_of(path).parse_args(options)
        except SystemExit as error:
            raise AssertionError(f"{program} {shlex.join(options)}: {said.getvalue()}") from error
        return
    for option in options:
        if option.startswith("--"):
            assert f'"{option.split("=")[0]}"' in source, f"python {program}: knows no {option}"


def parser_of(path: Path) -> argparse.ArgumentParser:
    """The parser of a program's options, which is started in this process up to where it would parse them."""

    def begin(parser: argparse.ArgumentParser, *_: Any) -> None:
        raise Begun(parser)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(argparse.ArgumentParser, "parse_known_args", begin)
        patch.setattr(sys, "path", [str(path.parent), *sys.path])
        patch.setattr(sys, "argv", [str(path), "--help"])
        try:
            runpy.run_path(str(path), run_name="__main__")
        except Begun as found:
            return found.parser
    raise AssertionError(f"{path.name} ended without a look at its options")


def _extras(packages: list[str]) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for package in packages:
        for extra in re.findall(r"\[(.*?)\]", package):
            for one in extra.split(","):
                assert one in project["optional-dependencies"], f"pip install {package}: no extra {one!r}"
