"""Progress of a computation of known length: a bar on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

LINE_EVERY_SECONDS = 5.0


class Counter:
    """Use as a context; call with what is done and how much there is. Shorter work shows nothing."""

    def __init__(self, label: str) -> None:
        console = Console(stderr=True)
        self._terminal, self._label = console.is_terminal, label
        columns = (TextColumn(label), BarColumn(bar_width=24), MofNCompleteColumn(), TimeRemainingColumn())
        self._bar = Progress(*columns, console=console, transient=True, disable=not self._terminal)
        self._task = self._bar.add_task(label, total=None)
        self._last = time.monotonic()

    def __call__(self, done: int, total: int) -> None:
        self._bar.update(self._task, completed=done, total=total)
        now = time.monotonic()
        if not self._terminal and now - self._last > LINE_EVERY_SECONDS:
            self._last = now
            print(f"{self._label}: {done}/{total}", file=sys.stderr)

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._bar.stop()
