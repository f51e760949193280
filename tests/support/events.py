"""The order of what happens in several processes: each waits for what another has done, never for a time."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from support.forks import Program

SECONDS = 300.0  # only a hang takes as long, however busy the machine is


def until(true: Callable[[], Any], process: Program | None = None) -> Any:
    """Wait for a true value, and return it.

    Raises AssertionError after five minutes, or if the process that is waited for ends.
    """
    end = time.monotonic() + SECONDS
    while not (value := true()):
        assert time.monotonic() < end, f"not within {SECONDS:g} s"
        assert process is None or process.poll() is None, process.communicate()
        time.sleep(0.02 if process else 0.005)  # a look at another process may read files
    return value


class Events:
    """What has happened, by its name, in a folder that the processes share."""

    def __init__(self, folder: str) -> None:
        self._folder = Path(folder)

    def tell(self, name: str) -> None:
        """It has happened."""
        (self._folder / name).touch()

    def wait(self, *names: str) -> None:
        """Until all of these have happened."""
        for name in names:
            until((self._folder / name).exists)

    def stop(self, *names: str) -> None:
        """Stop this process as SIGSTOP does; it goes on when all of these have happened, also if they have before."""
        me, there = (
            os.getpid(),
            " && ".join(f"[ -e {shlex.quote(str(self._folder / name))} ]" for name in names),
        )
        stopped = f"grep -q '^State:.T' /proc/{me}/status"
        shell = f"for n in $(seq {SECONDS:.0f}0); do {stopped} && {there} && break; sleep 0.1; done; kill -CONT {me}"
        with subprocess.Popen(["sh", "-c", shell]):
            os.kill(me, signal.SIGSTOP)
