"""The command line: one file per command. A mistake is answered by one sentence and exit status 2."""

from __future__ import annotations

import ast
import errno
import importlib
import inspect
import io
import os
import signal
import sys
from collections.abc import Sequence
from itertools import pairwise, takewhile
from pathlib import Path
from typing import Any

from paceline.cli import startup
from paceline.cli.startup import Ended
from paceline.commands import NAME, installation, program
from paceline.errors import PacelineError, WorkerError, meant, short

COMMANDS = (
    "train",
    "serve",
    "watch",
    "doctor",
    "verify",
    "report",
    "plan",
    "simulate",
    "whatif",
    "reproduce",
)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line and exit with its status."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # file names may have any characters
    sys.exit(run(sys.argv[1:] if arguments is None else list(arguments)))


def run(arguments: list[str]) -> int:
    """Run the command line and return its exit status: 0, 1 for a failed worker, 2 for a mistake, 130 for Ctrl-C, 143
    if SIGTERM ended a command in order."""
    try:
        with startup.loading(""):
            import typer
            from typer.exceptions import TyperException
    except ModuleNotFoundError:
        return _complain(f"the command line needs typer and rich; {installation('cli')}", 2)
    try:
        arguments = arguments or ["--help"]
        app = _app(arguments[0], helps="--help" in arguments)
        status = app.__call__(arguments, standalone_mode=False)
        return status if isinstance(status, int) else 0
    except typer.Exit as done:
        return done.exit_code
    except Ended as ended:
        return _complain("interrupted", ended.status)
    except TyperException as error:
        return _complain(_mistake(error, arguments), 2)
    except WorkerError as error:
        return _complain(str(error), 1)
    except PacelineError as error:
        return _complain(str(error), 2)
    except ModuleNotFoundError as error:
        return _complain(f"{error.name} {_missing(error, arguments[0])}", 2)
    except BrokenPipeError:  # the reader of the output, such as head, has ended
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return 1
    except OSError as error:  # about a file or an address, without a sentence of its own
        what = f"cannot use {os.fsdecode(error.filename)}: " if error.filename else ""
        advice = "raise the limit with ulimit -n" if error.errno == errno.EMFILE else "choose another"
        return _complain(f"{what}{error.strerror or error}; {advice}", 2)
    except (KeyboardInterrupt, typer.Abort):
        return _complain("interrupted", 128 + signal.SIGINT)


def _app(command: str = "", helps: bool = False):  # type: ignore[no-untyped-def]
    """The command line. command: the command to run; only its file is loaded. Without a command, the commands only
    have their help and do nothing. helps: the command is asked for its help."""
    import typer

    app = typer.Typer(
        add_completion=False,
        help="Data-parallel training at the pace of the whole cluster instead of its slowest worker.",
    )

    @app.callback(invoke_without_command=True)
    def top(version: bool = typer.Option(False, "--version", help="Print the version.")) -> None:
        if version:
            import paceline

            print(paceline.__version__)
            raise typer.Exit

    if command in COMMANDS:
        try:
            with startup.loading("Loading ..."):
                module = importlib.import_module(f"paceline.cli.{command}")
        except ModuleNotFoundError as error:
            if not helps:
                raise
            # A help text is rich's markup, in which brackets have a meaning.
            more = f"Its options need {error.name}, which {_missing(error, command)}".replace("[", "\\[")
            app.command(command, help=_help(command), epilog=more)(lambda: None)
            return app
        words = _as_started(inspect.getdoc(module.command) or "")
        end = module.more_help() if helps and hasattr(module, "more_help") else None
        app.command(command, help=words, epilog=end)(module.command)
    else:
        for name in COMMANDS:
            app.command(name, help=_help(name))(lambda: None)
    return app


def _missing(error: ModuleNotFoundError, command: str) -> str:
    """The rest of a sentence on a package that a command needs."""
    needs_torch = command in ("train", "verify") or error.name == "torch"
    return f"is not installed; {installation('torch' if needs_torch else 'cli')}"


def _help(command: str) -> str:
    """A command's docstring, read without importing its file, which may take seconds."""
    parts = ast.parse(Path(__file__).with_name(f"{command}.py").read_text(encoding="utf-8")).body
    functions = [part for part in parts if isinstance(part, ast.FunctionDef) and part.name == "command"]
    return _as_started(ast.get_docstring(functions[0]) or "")


def _as_started(text: str) -> str:
    """A help text whose example works in this shell."""
    return text.replace(f"For example: {NAME} ", f"For example: {program()} ")


def _mistake(error: Any, arguments: list[str]) -> str:
    """A sentence on a command line that cannot be parsed: what was given, and what was probably meant. error: an
    exception of typer, whose classes for single mistakes are not public."""
    path = " ".join([program(), *(name for name in arguments[:1] if name in COMMANDS)])
    see = f"see {path} --help"
    message = error.format_message() if hasattr(error, "format_message") else str(error)
    message = message.rstrip(".").replace(". Did you mean", "; did you mean")
    option = getattr(error, "option_name", None)
    if type(error).__name__ == "BadParameter":  # a number or a choice: other options take any text
        option, words = error.param.opts[0], list(takewhile("--".__ne__, arguments))
        after = [word for before, word in pairwise(words) if before == option]
        given = [word.partition("=")[2] for word in words if word.startswith(f"{option}=")]
        choices = message.partition(" is not one of ")[2]
        kind = "a whole number" if "valid int" in message or "an int" in message else "a number"
        kind = f"one of {choices}" if choices else kind
        message = f"{option} {short(['--', *after, *given][-1])}: expected {kind}"
    elif option is not None and hasattr(error, "possibilities"):
        known = [name for param in error.ctx.command.params for name in param.opts] if error.ctx else []
        near = meant(option, [name for name in known if name.startswith("--")])
        message = f"{path} has no option {option}{near}"
    return f"{message} S{see[1:]}" if message.endswith("?") else f"{message}; {see}"


def _complain(sentence: str, status: int) -> int:
    """Print one line, even if the sentence quotes names with line breaks; returns ``status``."""
    plain = "".join(each if each.isprintable() else repr(each)[1:-1] for each in sentence)
    print(f"paceline: {plain}", file=sys.stderr)
    return status
