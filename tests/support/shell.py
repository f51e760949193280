"""The commands of a page's ``bash`` blocks: run where that takes seconds, else held against the real options.

==================  ====================================================================================
``paceline ...``    run, with ``SHORTER``'s options added; those that ``READ_ONLY`` names are parsed by
                    the real command and not run
``torchrun``        parsed by torchrun's own parser, and the ``paceline`` command behind it by its own. A
                    program that the page itself made is run where there are several nodes: all on
                    this machine, at once, sleeping a tenth of what is said; for the first time by
                    torchrun itself, and then in processes that have PyTorch loaded
``python FILE``     the program exists and knows each ``--option`` (tests/examples/test_examples.py runs the examples)
``curl``            a block that has any is run by bash, as it is, against a ``paceline serve`` of its own
``make TARGET``     the target exists
``pip install``     the extras exist
==================  ====================================================================================

Any other command fails: nobody would notice when it stopped being true.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import tomllib
from collections.abc import Iterator
from pathlib import Path

import typer

from paceline import cli
from support import served
from support.commands import paceline
from support.forks import Program, all_well, as_torchrun, free_port

ROOT = Path(__file__).resolve().parents[2]

# Options added to what a page says, so that it takes seconds; the last one given counts.
SHORTER = {
    "train": ["--epochs", "1", "--steps", "4"],
    "simulate": ["--rounds", "12", "--realizations", "2"],
    "reproduce": ["--quick"],
}
# Commands that need another machine, minutes, or a terminal: parsed only. The first words decide.
READ_ONLY = (
    "paceline reproduce",  # each is run by tests/papers; `--list` below is not affected
    "paceline train --data mnist",  # files that users bring
    "paceline train --data cifar10",
    "paceline watch",  # servers, which end when they are told to
    "paceline serve",
    "paceline doctor",  # watches a script of the user's; tests/doctor runs it
    "paceline verify",  # runs a script of the user's; tests/verify does
    "paceline report runs/mine",  # the record of a run of the user's
    "paceline whatif runs/mine",
)
SILENT = ("cd", "source")  # of the shell itself: nothing to check


class Shell:
    """One page's shell: variables that it exported, and nodes that wait for the others."""

    def __init__(self) -> None:
        self._exported: dict[str, str] = {}
        self._nodes: list[tuple[list[str], dict[str, str]]] = []
        self._launched = False

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
                check(words)

    def _curl(self, block: str) -> None:
        """Run the block as it is, by bash, against a service that was just started."""
        with served.process(Path("served").absolute(), "--batch", "256", "--workers", "1") as service:
            done = subprocess.run(
                ["bash", "-euo", "pipefail", "-c", block.replace("http://127.0.0.1:7070", service.url)],
                env=os.environ | {"PACELINE_TOKEN": served.TOKEN},
                capture_output=True,
                text=True,
                timeout=120,
            )
        assert done.returncode == 0, done.stdout + done.stderr

    def close(self) -> None:
        """The page is over: AssertionError for a node whose peers never came."""
        assert not self._nodes, (
            f"torchrun {shlex.join(self._nodes[0][0])}: the page has no command for its peers"
        )

    def _torchrun(self, arguments: list[str], given: dict[str, str]) -> None:
        from torch.distributed.run import get_args_parser

        parsed = get_args_parser().parse_args(arguments)
        behind = [parsed.training_script, *parsed.training_script_args]
        if parsed.module:
            assert behind[0] == "paceline", f"torchrun -m {behind[0]}: expected paceline"
            parse_paceline(behind[1:])
            return
        _program(behind[0], behind[1:])
        nodes = int(parsed.nnodes.split(":")[0])
        if nodes == 1 or not Path(behind[0]).is_file():
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
            all_well([told | own for told, (_, own) in variables], behind)


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


def check(words: list[str]) -> None:
    """Run or check one command; AssertionError says what is wrong with it."""
    line = shlex.join(words)
    match words:
        case ["paceline", *arguments]:
            _paceline(arguments, line)
        case ["python" | "python3", "-m", "paceline", *arguments]:
            _paceline(arguments, line)
        case ["python" | "python3", "-m", "venv", _]:
            pass
        case ["python" | "python3", program, *options]:
            _program(program, options)
        case ["make", *targets]:
            rules = re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
            assert set(targets) <= set(rules), f"{line}: the Makefile has {', '.join(rules)}"
        case ["pip", "install", *packages] | [".venv/bin/pip", "install", *packages]:
            _extras(packages)
        case [first, *_] if first in SILENT:
            pass
        case _:
            raise AssertionError(f"{line}: no test knows how to check this command")


def _paceline(arguments: list[str], line: str) -> None:
    parse_paceline(arguments)
    if line.startswith(READ_ONLY) and "--list" not in arguments:
        return
    whole = {"--list", "--trace", "--resume"} & set(arguments)
    shorter = [] if whole else list(SHORTER.get(arguments[0], []))
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


def _program(program: str, options: list[str]) -> None:
    path = ROOT / program if (ROOT / program).exists() else Path(program)
    assert path.is_file(), f"python {program}: no such file"
    source = path.read_text(encoding="utf-8")
    for option in options:
        if option.startswith("--"):
            assert f'"{option.split("=")[0]}"' in source, f"python {program}: knows no {option}"


def _extras(packages: list[str]) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for package in packages:
        for extra in re.findall(r"\[(.*?)\]", package):
            for one in extra.split(","):
                assert one in project["optional-dependencies"], f"pip install {package}: no extra {one!r}"
