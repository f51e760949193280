"""How Ctrl-C, SIGTERM and a closed terminal end a long command: in order, however it was started.

A shell that runs a script starts ``command &`` with SIGINT ignored, and many CI runners do the same to all that they
start. Such a command hears of Ctrl-C here all the same. Only one that was started by ``nohup``, which is known by
SIGHUP being ignored as well, is to outlive its terminal: there SIGINT stays ignored, and SIGTERM ends the command.
"""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Callable, Iterator

ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
SAME_SECONDS = 1.0  # ``timeout`` and shells send a signal twice: to the command, and to its whole group


class Ended(Exception):
    """A command has ended, in order, because a signal asked for it. status: the exit status that says so."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.status = 128 + number


@contextlib.contextmanager
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


def outlives_terminal() -> bool:
    """Whether ``nohup`` started this process: then neither its terminal's end nor Ctrl-C in it are meant for it."""
    return signal.getsignal(signal.SIGHUP) is signal.SIG_IGN


def _ours(number: int, handler: object) -> bool:
    if number == signal.SIGINT:
        return handler is signal.default_int_handler or (
            handler in (signal.SIG_IGN, signal.SIG_DFL) and not outlives_terminal()
        )
    return handler is signal.SIG_DFL or (handler is signal.SIG_IGN and number == signal.SIGTERM)
