"""Run a command that the user gave, in its own session, and end all its processes with this one."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from subprocess import DEVNULL, PIPE, STDOUT
from typing import IO

from paceline.errors import PacelineError

ENTRY = "PACELINE_ATTACH"  # variable in the command's environment, which attach/site/sitecustomize.py reads
DRAIN_SECONDS = 2.0  # for the remaining output of a command that has ended
GRACE_SECONDS = 10.0  # between SIGTERM and SIGKILL
# Ends the command's processes when the process that started this shell has ended and its end of the pipe is closed.
GUARD = "read _; kill -s TERM -- -{group}; sleep {grace}; kill -s KILL -- -{group}"


def entering(module: str, kind: str, function: str) -> dict[str, str]:
    """Environment variables with which each Python process of a command calls ``function`` (``module:name``) where it
    makes its first object of the class ``kind`` in ``module``, with the constructor before its arguments."""
    here = str(Path(__file__).parent / "site")
    path = os.pathsep.join(filter(None, (here, os.environ.get("PYTHONPATH"))))
    return {ENTRY: f"{module} {kind} {function}", "PYTHONPATH": path, "PYTHONUNBUFFERED": "1"}


def check_command(command: Sequence[str]) -> None:
    """Raises PacelineError if there is no such command."""
    if shutil.which(command[0]) is None:
        raise PacelineError(
            f"{command[0]}: no such command; give the command that starts the training, after --"
        )


@contextlib.contextmanager
def started(
    command: Sequence[str], added: Mapping[str, str], on_line: Callable[[str], None]
) -> Iterator[subprocess.Popen[bytes]]:
    """The running command; at the end of the ``with`` block, all its processes are ended.

    added: variables of its environment. on_line: called in a thread with each line that it prints, up to the moment
    when it is ended from here: its messages about that are not about the training.
    """
    process = subprocess.Popen(
        command,
        env=os.environ | dict(added),
        stdin=DEVNULL,
        stdout=PIPE,
        stderr=STDOUT,
        start_new_session=True,
    )
    assert process.stdout is not None
    shell = ["/bin/sh", "-c", GUARD.format(group=process.pid, grace=int(GRACE_SECONDS))]
    guard = subprocess.Popen(shell, stdin=PIPE, stdout=DEVNULL, stderr=DEVNULL, start_new_session=True)
    muted = threading.Event()
    relay = threading.Thread(target=_relay, args=(process.stdout, muted, on_line), daemon=True)
    relay.start()
    try:
        yield process
        if process.poll() is not None:
            relay.join(DRAIN_SECONDS)
    finally:
        muted.set()
        _end(process)
        guard.kill()
        guard.communicate()
        relay.join(DRAIN_SECONDS)


def _relay(source: IO[bytes], muted: threading.Event, on_line: Callable[[str], None]) -> None:
    for line in source:
        if not muted.is_set():
            on_line(line.decode(errors="replace"))


def _end(process: subprocess.Popen[bytes]) -> None:
    for sign in (signal.SIGTERM, signal.SIGKILL):  # SIGKILL also ends ranks that outlive their launcher
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, sign)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(GRACE_SECONDS)
