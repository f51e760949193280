"""The command line, called in this process as a person would in a shell; and code in an interpreter of its own."""

from __future__ import annotations

import contextlib
import io
import os
import re
import sys
from pathlib import Path
from subprocess import CompletedProcess, run
from typing import NamedTuple

from paceline import cli


def installs(extra: str) -> str:
    """A pattern for the advice to install an optional part of Paceline."""
    return rf"run: (\S*python\S* -m )?pip install '?\S*\[{extra}\]'?"


class Said(NamedTuple):
    """What a command left: its exit status, what it printed, its complaint."""

    status: int
    stdout: str
    stderr: str


def paceline(*arguments: object) -> Said:
    """``paceline ARGUMENTS...``."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        status = cli.run([*map(str, arguments)])
    return Said(status, out.getvalue(), err.getvalue())


def python(code: str, *options: str, place: Path | None = None, **environment: str) -> CompletedProcess[str]:
    """An interpreter of its own that runs this code, in this folder; within ``forks.warm()``, a fork."""
    return run(
        [sys.executable, *options, "-c", code], cwd=place, capture_output=True, text=True, timeout=600,
        env=os.environ | environment,
    )  # fmt: skip


def assert_refused(said: Said, words: str) -> None:
    """Status 2 and one sentence that matches ``words``."""
    assert said.status == 2
    assert said.stderr.startswith("paceline: ")
    assert said.stderr.count("\n") == 1
    assert re.search(words, said.stderr)


def assert_refused_at_last(said: Said, words: str) -> None:
    """Status 2 and one sentence after what the command itself printed."""
    assert said.status == 2, said.stderr
    last = said.stderr.splitlines()[-1]
    assert last.startswith("paceline: ")
    assert words in last
