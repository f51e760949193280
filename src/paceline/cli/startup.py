"""The begin and the end of commands.

A command first shows that it is loading, which takes seconds, and a training shows how to watch it. Ctrl-C, SIGTERM
and a closed terminal end a long command in order, however it was started: a shell that runs a script starts
``command &`` with SIGINT ignored, and many CI runners do the same with all their processes. Here, Ctrl-C ends such a
command nevertheless. Only a command that was started by ``nohup``, which is recognized by SIGHUP being ignored as
well, must outlive its terminal: SIGINT stays ignored, and SIGTERM ends the command.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from paceline.commands import line
from paceline.errors import PacelineError
from paceline.files import check_directory


def place(out: str | None, data: str, model: str, chosen: list[str]) -> Path:
    """The run directory, which has a subdirectory for each of several policies: ``out``, or runs/LABEL, or
    runs/LABEL-2 and so on if that exists. Raises PacelineError if it cannot be made or is not empty."""
    kind = chosen[0].split(":")[0] if len(chosen) == 1 else "compare"
    # Unknown names of policies are reported later; no directory is named after them.
    kind = kind if kind.replace("-", "").isalnum() else "train"
    label, number = f"{Path(data).stem}-{model}-{kind}", 1
    base = Path(out) if out is not None else Path("runs") / label
    while out is None and base.exists():
        number += 1
        base = base.with_name(f"{label}-{number}")
    check_directory(base)
    if base.exists() and any(base.iterdir()) and not restarted() and leads():
        raise PacelineError(
            f"run directory {base} exists; choose another with --out, or continue with --resume {base}"
        )
    return base


@contextmanager
def loading(words: str) -> Iterator[None]:
    """Show on a terminal, within the context, what is being loaded. At the end the text is removed. Ctrl-C ends the
    process at once: an exception in the middle of an import becomes a traceback or another error."""
    shown = leads() and sys.stderr.isatty() and os.environ.get("TERM") != "dumb"
    words, clear = (words, "\r\x1b[K") if shown and words else ("", "")

    def end(*_: object) -> None:
        os.write(2, f"{clear}paceline: interrupted\n".encode())
        os._exit(128 + signal.SIGINT)

    with _handling((signal.SIGINT,), end):
        print(words, end="", file=sys.stderr, flush=True)
        try:
            yield
        finally:
            print(clear, end="", file=sys.stderr, flush=True)


def announce(base: Path, target: str | None) -> None:
    """Print how to watch the run, on standard error if ``target``, the file of the figures, is standard output."""
    if leads():
        where = sys.stderr if target == "-" else sys.stdout
        print(f"Watch this run in a browser: {line('watch', base)}", file=where, flush=True)


def launched() -> bool:
    """Whether a launcher, such as torchrun, has started this process and set its rank."""
    return all(name in os.environ for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"))


def leads() -> bool:
    """Whether this process is the one that writes files and prints."""
    return not launched() or os.environ["RANK"] == "0"


def restarted() -> bool:
    """Whether torchrun restarted this process after a failure; it then continues in the same directory."""
    count = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return launched() and count.isdecimal() and int(count) > 0


ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
SAME_SECONDS = 1.0  # ``timeout`` and shells send a signal twice: to the command and to its process group


class Ended(Exception):
    """A signal has ended a command in order. status: the exit status for this signal."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.status = 128 + number


@contextmanager
def interruptible(wanted: bool = True) -> Iterator[Callable[[], bool]]:
    """Within this context Ctrl-C, SIGTERM and SIGHUP raise KeyboardInterrupt; gives a function: whether one came.

    The context raises ``Ended``, which knows the signal, since typer takes any KeyboardInterrupt for Ctrl-C.

    The function is for loops that wait, because an exception that is raised while Python destroys an object is lost.
    A second signal within a second counts as the same; a later one raises again and interrupts the end in order.
    Signals that already have another handler keep it. Outside of the main thread, or if it is not ``wanted``, nothing
    changes.
    """
    came: list[tuple[float, int]] = []

    def interrupt(number: int, _: object) -> None:
        now = time.monotonic()
        if not came or now - came[-1][0] > SAME_SECONDS:
            came.append((now, number))
            raise KeyboardInterrupt

    with _handling(ENDING if wanted else (), interrupt):
        try:
            yield lambda: bool(came)
        except KeyboardInterrupt as error:
            raise Ended(came[-1][1] if came else signal.SIGINT) from error


@contextmanager
def _handling(numbers: Iterable[int], handler: Callable[[int, Any], None]) -> Iterator[None]:
    """Within this context ``handler`` gets these signals, except those that already have another handler."""
    before: dict[int, Any] = {}
    if threading.current_thread() is threading.main_thread():  # no other thread can set handlers
        before = {number: signal.getsignal(number) for number in numbers}
        before = {number: old for number, old in before.items() if _ours(number, old)}
    for number in before:
        signal.signal(number, handler)
    try:
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, old)


def _ours(number: int, handler: object) -> bool:
    # If ``nohup`` started this process, it must outlive its terminal and ignore Ctrl-C.
    outlives_terminal = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    if number == signal.SIGINT:
        return handler is signal.default_int_handler or (
            handler in (signal.SIG_IGN, signal.SIG_DFL) and not outlives_terminal
        )
    return handler is signal.SIG_DFL or (handler is signal.SIG_IGN and number == signal.SIGTERM)
