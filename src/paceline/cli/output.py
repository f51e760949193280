"""The progress that a command shows while it works, and the output of its figures (``--json FILE|-``)."""

from __future__ import annotations

import io
import json
import os
import sys
import time
from typing import Any, Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from paceline.files import check_place, write_whole

LINE_EVERY_SECONDS = 5.0


class ProgressDisplay:
    """Progress of work of known length: a bar on a terminal; elsewhere, a line every few seconds.

    Use it as a context manager, and call it with the done and the total amount. ``note`` is shown beside them.

    unit: what is counted, for lines. lasting: the end is also shown and stays; else short work shows nothing.
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
        """Show the done and the total amount before the work begins."""
        self._bar.update(self._task, completed=done, total=total, note=note)

    def note(self, text: str) -> None:
        """Show another text beside the count."""
        self._bar.update(self._task, note=text)
        now = time.monotonic()
        if not self.console.is_terminal and now - self._last > LINE_EVERY_SECONDS:
            self._last = now
            self.console.print(f"{self._label}  {text}", markup=False)

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()


def console_for(target: str | None) -> Console:
    """The console for people, besides the figures for ``target``; in a file or a pipe, wide enough for the table."""
    console = Console(stderr=target == "-", highlight=False, soft_wrap=True)
    if not console.is_terminal:
        console.width = 110
    return console


class _Output(io.FileIO):
    """Standard output that discards what is written after its reader has closed the pipe."""

    def write(self, data: Any, /) -> int:
        try:
            return super().write(data)
        except BrokenPipeError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), self.fileno())
            print(
                "paceline: the output has no reader any more; the run continues without it", file=sys.stderr
            )
            return len(data)


def outlive_reader() -> None:
    """Let a command continue when the reader of its output, such as ``head``, has ended: its results are files."""
    out = sys.stdout
    if isinstance(out, io.TextIOWrapper) and out is sys.__stdout__:
        buffer = io.BufferedWriter(_Output(out.fileno(), "w", closefd=False))
        sys.stdout = io.TextIOWrapper(buffer, out.encoding, out.errors, line_buffering=True)


def check_json(target: str | None) -> None:
    """Raises PacelineError, before the work is done, if figures cannot be written to ``target``."""
    if target is not None and target != "-":
        check_place(target)


def write_json(target: str | None, content: Any, indent: int | None = None) -> None:
    """Write figures to a file, to standard output for "-", or nowhere for None; infinity and NaN become null."""
    if target is None:
        return
    from paceline.runs.record import plain  # it loads numpy

    text = json.dumps(plain(content), indent=indent, allow_nan=False) + "\n"
    if target == "-":
        sys.stdout.write(text)
    else:
        write_whole(target, text)
