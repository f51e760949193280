"""Programs that go on beside a test, as ``python`` starts them, but forked from a server that has PyTorch loaded.

One that starts such a server itself, as ``paceline train`` does, gets a fork in its place, which knows nothing of the
program. The processes below it are the same, with the same parents and in the same session, but nobody loads PyTorch
once more.
"""

from __future__ import annotations

import multiprocessing
import os
import resource
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Mapping, Sequence
from multiprocessing import forkserver, resource_tracker, util
from pathlib import Path
from typing import Any

from support import ranks as forks

LIFE = ("SIGINT", "SIGTERM", "SIGHUP")


class Program:
    """As ``subprocess.Popen`` of ``python WORDS...`` in this folder, in a session of its own, whose output is text.

    environment: variables beside those of the tests. limits: of ``resource.setrlimit``. ignored: signals that its
    parent ignores. words: a file, or ``-m`` and a module, and its arguments.
    """

    def __init__(
        self,
        words: Sequence[object],
        place: Path,
        environment: Mapping[str, str] | None = None,
        limits: Mapping[int, int] | None = None,
        ignored: Sequence[int] = (),
    ) -> None:
        forks.load("paceline.cli", "paceline.train.launch")
        self._said = tempfile.TemporaryDirectory()
        life = [*map(str, words)], place, dict(os.environ) | dict(environment or {}), dict(limits or {})
        context = multiprocessing.get_context("forkserver")
        self._process = context.Process(target=_life, args=(*life, [*map(int, ignored)], self._said.name))
        self._process.start()
        assert self._process.pid is not None
        self.pid = self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if self.returncode is None:
            raise subprocess.TimeoutExpired("python", timeout or 0.0)
        return self.returncode

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """What it wrote to standard output and to standard error until its end."""
        self.wait(timeout)
        out, err = (Path(self._said.name, name).read_text() for name in ("out", "err"))
        return out, err

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)


def _life(
    words: list[str],
    place: Path,
    environment: dict[str, str],
    limits: dict[int, int],
    ignored: list[int],
    said: str,
) -> None:
    os.setsid()
    for number, name in ((1, "out"), (2, "err")):
        os.dup2(os.open(f"{said}/{name}", os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
    _close_but(())
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(place)
    for name in LIFE:
        number = getattr(signal, name)
        usual = signal.default_int_handler if name == "SIGINT" else signal.SIG_DFL
        signal.signal(number, signal.SIG_IGN if number in ignored else usual)
    for kind, most in limits.items():
        resource.setrlimit(kind, (most, most))
    # It has no server of forks and no tracker of resources yet.
    for none in (forkserver._forkserver, resource_tracker._resource_tracker):  # type: ignore[attr-defined]
        none.__init__()
    util.spawnv_passfds = _ready(util.spawnv_passfds)  # type: ignore[attr-defined]
    status = 1
    try:
        if words[0] == "-m":
            sys.argv, sys.path[0] = words[1:], str(place)
            runpy.run_module(words[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv, sys.path[0] = words, str(Path(words[0]).parent)
            runpy.run_path(words[0], run_name="__main__")
        status = 0
    except SystemExit as ended:
        status = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        util._exit_function()  # type: ignore[attr-defined]  # what the interpreter does at its end
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(status)


def _close_but(kept: Sequence[int]) -> None:
    """As where a program begins: of the files that are open, it has these and the first three."""
    for number in map(int, os.listdir("/proc/self/fd")):
        if number > 2 and number not in kept:
            try:
                os.close(number)
            except OSError:  # the one that lists them
                continue


def _ready(start: Any) -> Any:
    """``start``, but for a server of forks: that is a fork of this process, made now and ready to become one."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    if (process := os.fork()) == 0:
        try:
            _close_but([theirs.fileno()])
            command, files, _, _ = socket.recv_fds(theirs, 1 << 16, 2)
            theirs.close()
            if command:
                numbers, code = command.decode().split(" ", 1)
                exec(_with_files(code, list(map(int, numbers.split(","))), files), {})
        finally:
            os._exit(0)
    theirs.close()

    def instead(path: object, arguments: list[str], files: list[int]) -> int:
        if "multiprocessing.forkserver" not in arguments[-1]:
            return int(start(path, arguments, files))
        socket.send_fds(ours, [f"{','.join(map(str, files))} {arguments[-1]}".encode()], files)
        ours.close()
        return process

    return instead


def _with_files(command: str, named: list[int], here: list[int]) -> str:
    """A command that begins with "main(" and the numbers of two files, which have others here."""
    old, new = (f"main({first}, {second}, " for first, second in (named, here))
    assert old in command, command
    return command.replace(old, new)
