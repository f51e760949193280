"""Ctrl-C and SIGTERM, in programs that were started in every way in which shells and runners start them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from paceline.cli import startup
from support.guarantees import guarantee

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="signals of POSIX")

# A program prepares the signals, not a function between fork and exec: after a plain fork, the threads of a Ray in
# the process of the tests may wait for ever.
PREPARE = """
import os, signal, sys
ignored = set(map(int, sys.argv[1].split(",") if sys.argv[1] else []))
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
    signal.signal(number, signal.SIG_IGN if number in ignored else signal.SIG_DFL)
os.execv(sys.argv[2], sys.argv[2:])
"""
PROGRAM = """
import sys, time
from paceline.cli.startup import Ended, interruptible
try:
    with interruptible() as came:
        try:
            print("ready", flush=True)
            for _ in range(600):  # a signal between Python's check and a long sleep would be seen behind it
                time.sleep(0.1)
        finally:
            assert came()
            time.sleep(0.3)  # what a command does to end in order
            print("in order", flush=True)
except Ended as ended:
    sys.exit(ended.status)
"""


def started(*ignored: int) -> subprocess.Popen[str]:
    """The program, of SIGINT, SIGTERM and SIGHUP these ignored."""
    listed = ",".join(str(int(each)) for each in ignored)
    command = [sys.executable, "-S", "-c", PREPARE, listed, sys.executable, "-c", PROGRAM]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n", process.communicate()[1]
    return process


@guarantee(
    "Ctrl-C, SIGTERM or a closed terminal leave a whole record and no process, with status 130, 143 or 129, "
    "also if SIGINT was ignored."
)
@pytest.mark.parametrize(
    ("ignored", "sent", "status"),
    [
        ([], signal.SIGINT, 130),
        ([], signal.SIGTERM, 143),
        ([], signal.SIGHUP, 129),
        ([signal.SIGINT], signal.SIGINT, 130),  # a script's `command &`, many runners
        ([signal.SIGINT, signal.SIGTERM], signal.SIGTERM, 143),
        ([signal.SIGINT, signal.SIGHUP], signal.SIGTERM, 143),  # a script's `nohup command &`
        ([signal.SIGHUP], signal.SIGINT, 130),  # `nohup command`, in the terminal
    ],
)
def test_the_end_in_order(ignored: list[int], sent: int, status: int) -> None:
    process = started(*ignored)
    for _ in range(2):  # as `timeout` does: to the command, and to its group
        process.send_signal(sent)
    out, err = process.communicate(timeout=400)
    assert (process.returncode, out) == (status, "in order\n"), err


def test_ctrl_c_while_pytorch_loads_prints_one_message(tmp_path: Path) -> None:
    """It reaches the server from which they are forked, too."""
    command = [sys.executable, "-m", "paceline", "train", "--workers", "2", "--out", str(tmp_path / "run")]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True)
    until = time.monotonic() + 400
    while not any("multiprocessing.forkserver" in words for words in commands(process.pid)):
        assert time.monotonic() < until
        time.sleep(0.02)
    time.sleep(0.5)
    os.killpg(process.pid, signal.SIGINT)
    said = process.communicate(timeout=400)[1]
    assert process.returncode == 130
    assert "paceline: interrupted" in said
    assert "Traceback" not in said


def test_ctrl_c_while_pytorch_is_imported_is_no_traceback(tmp_path: Path) -> None:
    """The import of an extension may print an exception and raise another one in its place."""
    (tmp_path / "torch.py").write_text(
        "import time, traceback\nprint('importing', flush=True)\ntry:\n    time.sleep(60)\n"
        "except BaseException as error:\n    traceback.print_exc()\n    raise ImportError from error\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-m", "paceline", "train"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join((str(tmp_path), *sys.path))},
        cwd=tmp_path,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "importing\n", process.communicate()[1]
    process.send_signal(signal.SIGINT)
    said = process.communicate(timeout=400)[1]
    assert process.returncode == 130, said
    assert "Traceback" not in said


def commands(parent: int) -> list[str]:
    """Of the processes that this one has started."""
    with suppress(psutil.Error):
        return [" ".join(child.cmdline()) for child in psutil.Process(parent).children()]
    return []


@guarantee("Ctrl-C does not end a command under `nohup`.")
def test_nohup_means_it() -> None:
    process = started(signal.SIGINT, signal.SIGHUP)
    process.send_signal(signal.SIGINT)
    process.send_signal(signal.SIGHUP)
    process.send_signal(signal.SIGTERM)  # what comes before it in time is dealt with before it
    assert process.wait(400) == 143


@pytest.fixture
def default_sigterm() -> Iterator[None]:
    """SIGTERM as in a fresh process; a Ray in this one may have its own handler."""
    before = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGTERM, before)


@pytest.mark.usefixtures("default_sigterm")
def test_what_somebody_else_handles_stays_theirs() -> None:
    def theirs(*_: object) -> None: ...

    before = signal.signal(signal.SIGINT, theirs)
    try:
        with startup.interruptible():
            assert signal.getsignal(signal.SIGINT) is theirs
            assert signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("default_sigterm")
def test_outside_of_the_main_thread_nothing_changes() -> None:
    seen: list[object] = []

    def look() -> None:
        with startup.interruptible() as came:
            seen.extend([signal.getsignal(signal.SIGTERM), came()])

    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    assert seen == [signal.SIG_DFL, False]
