"""Calls the command line in this process, as a person would in a shell."""

from __future__ import annotations

import contextlib
import io
import re
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
