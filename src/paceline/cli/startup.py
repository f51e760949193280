"""How commands begin and end.

They say first that something is being loaded, which takes seconds; of a training, how to watch it. Ctrl-C, SIGTERM
and a closed terminal end a long command in order, however it was started: a shell that runs a script starts
``command &`` with SIGINT ignored, and many CI runners do the same to all that they start. Such a command hears of
Ctrl-C here all the same. Only one that was started by ``nohup``, which is known by SIGHUP being ignored as well, is
to outlive its terminal: there SIGINT stays ignored, and SIGTERM ends the command.
"""

from __future__ import annotations

import os
import shlex
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from paceline.errors import PacelineError
from paceline.files import check_directory


def place(out: str | None, data: str, model: str, chosen: list[str]) -> Path:
    """The directory that the run goes into, one of its own for each of several policies: ``out``, or runs/LABEL, or
    runs/LABEL-2 and so on if that exists.

    Raises PacelineError if it cannot be made or holds something already.
    """
    kind = chosen[0].split(":")[0] if len(chosen) == 1 else "compare"
    # Words that are no policy's name are told later; no directory is named after them.
    kind = kind if kind.replace("-", "").isalnum() else "train"
    label, number = f"{Path(data).stem}-{model}-{kind}", 1
    base = Path(out) if out is not None else Path("runs") / label
    while out is None and base.exists():
        number += 1
        base = base.with_name(f"{label}-{number}")
    check_directory(base)
    if base.exists() and any(base.iterdir()) and not restarted() and leads():
        raise PacelineError(
            f"run directory {base} exists; choose another with --out, or go on with --resume {base}"
        )
    return base


@contextmanager
def loading(words: str) -> Iterator[None]:
    """Say on a terminal what is being loaded, as long as the context lasts.

    Nobody waits before an empty screen then, and nothing of it stays: what is wrong with the options is told alone.
    """
    shown = leads() and sys.stderr.isatty() and os.environ.get("TERM") != "dumb"
    if shown:
        print(words, end="", file=sys.stderr, flush=True)
    try:
        yield
    finally:
        if shown:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)


def announce(base: Path, target: str | None) -> None:
    """How to watch the run. target: where figures go (``--json``); people read beside them."""
    if leads():
        where = sys.stderr if target == "-" else sys.stdout
        print(f"Watch this run in a browser: paceline watch {shlex.quote(str(base))}", file=where, flush=True)


def launched() -> bool:
    """Whether a launcher, such as torchrun, has started this process and said which rank it is."""
    return all(name in os.environ for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"))


def leads() -> bool:
    """Whether this process is the one that writes and speaks."""
    return not launched() or os.environ["RANK"] == "0"


def restarted() -> bool:
    """Whether torchrun started this process again after a failure: it goes on in the same directory."""
    count = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return launched() and count.isdecimal() and int(count) > 0


ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
SAME_SECONDS = 1.0  # ``timeout`` and shells send a signal twice: to the command, and to its whole group


class Ended(Exception):
    """A command has ended, in order, because a signal asked for it. status: the exit status that says so."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.status = 128 + number


@contextmanager
def heard(wanted: bool = True) -> Iterator[Callable[[], bool]]:
    """Within this context Ctrl-C, SIGTERM and SIGHUP raise KeyboardInterrupt; gives a function that says if one came.

    What leaves the context is ``Ended``, which knows the signal; typer makes Ctrl-C of any KeyboardInterrupt.

    That function is for loops that wait: an exception that is raised while Python destroys an object is lost. A
    second signal within a second counts as the same; a later one raises again, and breaks off the end in order.
    Signals that somebody else handles already stay with them; outside of the main thread, or where it is not
    ``wanted``, nothing changes.
    """
    came: list[tuple[float, int]] = []

    def interrupt(number: int, _: object) -> None:
        now = time.monotonic()
        if not came or now - came[-1][0] > SAME_SECONDS:
            came.append((now, number))
            raise KeyboardInterrupt

    before = {}
    if wanted and threading.current_thread() is threading.main_thread():  # the only one that hears of signals
        before = {number: signal.getsignal(number) for number in ENDING}
        before = {number: handler for number, handler in before.items() if _ours(number, handler)}
    for number in before:
        signal.signal(number, interrupt)
    try:
        yield lambda: bool(came)
    except KeyboardInterrupt as error:
        raise Ended(came[-1][1] if came else signal.SIGINT) from error
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _ours(number: int, handler: object) -> bool:
    # Where ``nohup`` started this process, neither its terminal's end nor Ctrl-C in it are meant for it.
    outlives_terminal = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    if number == signal.SIGINT:
        return handler is signal.default_int_handler or (
            handler in (signal.SIG_IGN, signal.SIG_DFL) and not outlives_terminal
        )
    return handler is signal.SIG_DFL or (handler is signal.SIG_IGN and number == signal.SIGTERM)
