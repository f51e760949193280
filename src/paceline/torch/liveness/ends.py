"""How a program may end without a word to Paceline: by an exception that nobody catches, or simply at its end."""

from __future__ import annotations

import atexit
import os
import sys
import weakref
from types import TracebackType
from typing import Protocol

from paceline.errors import WorkerError
from paceline.torch.liveness import patience


class Told(Protocol):
    """Who is told of the program's end."""

    def fail(self, error: BaseException) -> None:
        """By this error, which nobody has caught."""
        ...

    def reason(self, error: BaseException | None) -> WorkerError | None:
        """What to say of such an error beside itself; None where there is nothing more."""
        ...

    def close(self) -> None:
        """In good order."""
        ...


_watched: weakref.WeakSet[Told] = weakref.WeakSet()
_before = sys.excepthook
_process = 0  # that the hooks were set in; what is forked from it is not its business


def watch(lookout: Told) -> None:
    """Tell this one when the program ends."""
    global _before, _process
    if _process != os.getpid():
        _watched.clear()
        _process = os.getpid()
        atexit.register(_end)
    if sys.excepthook is not _uncaught:
        _before, sys.excepthook = sys.excepthook, _uncaught
    _watched.add(lookout)


def forget(lookout: Told) -> None:
    """It has ended."""
    _watched.discard(lookout)
    if not _watched and sys.excepthook is _uncaught:
        sys.excepthook = _before


def _uncaught(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    open_ones = list(_watched) if _process == os.getpid() else []
    for one in open_ones:
        one.fail(error)
    _before(kind, error, trace)
    for one in open_ones:
        if (reason := one.reason(error)) is not None:
            patience.last_words(str(reason))


def _end() -> None:
    if _process == os.getpid():
        for one in list(_watched):
            one.close()
