"""Progress of work of known length: a bar on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import time
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

LINE_EVERY_SECONDS = 5.0


class Counter:
    """Use as a context; call with what is done and how much there is. ``note`` is shown beside it.

    unit: what is counted, for lines. lasting: the end is shown, too, and stays; else short work shows nothing.
    """

    def __init__(
        self,
        label: str,
        console: Console | None = None,
        *,
        unit: str = "",
        note: str = "",
        lasting: bool = False,
    ) -> None:
        self.console = console or Console(stderr=True)
        self._label, self._unit, self._lasting = label, unit, lasting
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[note]}"),
            console=self.console,
            transient=not lasting,
            disable=not self.console.is_terminal,
        )
        self._task = self._bar.add_task(label, total=None, note=note)
        self._last = time.monotonic()

    def __call__(self, done: int, total: int, note: str = "") -> None:
        self._bar.update(self._task, completed=done, total=total, note=note)
        now, last = time.monotonic(), self._lasting and done == total
        if not self.console.is_terminal and (last or now - self._last > LINE_EVERY_SECONDS):
            self._last = now
            words = (self._label, f"{self._unit} {done}/{total}".strip(), note)
            self.console.print("  ".join(filter(None, words)))

    def begin(self, done: int, total: int, note: str = "") -> None:
        """Show how much is done before anything is."""
        self._bar.update(self._task, completed=done, total=total, note=note)

    def note(self, text: str) -> None:
        """Say something else beside the count."""
        self._bar.update(self._task, note=text)
        now = time.monotonic()
        if not self.console.is_terminal and now - self._last > LINE_EVERY_SECONDS:
            self._last = now
            self.console.print(f"{self._label}  {text}", markup=False)

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._bar.stop()
