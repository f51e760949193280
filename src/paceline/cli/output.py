"""What a command says of its work while that goes on, and where its figures go (``--json FILE|-``)."""

from __future__ import annotations

import io
import json
import os
import sys
import time
from pathlib import Path
from typing import Any, Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from paceline.errors import PacelineError
from paceline.files import check_place, write_whole

LINE_EVERY_SECONDS = 5.0


class Counter:
    """Progress of work of known length: a bar on a terminal, a line now and then elsewhere.

    Use as a context; call with what is done and how much there is. ``note`` is shown beside it.

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

    def __exit__(self, *_: object) -> None:
        self._bar.stop()


def console_for(target: str | None) -> Console:
    """Where people read, beside figures that go to ``target``: wide enough for the table in a file or pipe."""
    console = Console(stderr=target == "-", highlight=False, soft_wrap=True)
    if not console.is_terminal:
        console.width = 110
    return console


class _Output(io.FileIO):
    """Standard output, until nobody reads it any more."""

    def write(self, data: Any, /) -> int:
        try:
            return super().write(data)
        except BrokenPipeError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), self.fileno())
            print("paceline: nobody reads the output any more; the run goes on without it", file=sys.stderr)
            return len(data)


def outlive_reader() -> None:
    """Let a command go on when whoever reads its output has gone, as ``head`` does: what it makes is files."""
    out = sys.stdout
    if isinstance(out, io.TextIOWrapper) and out is sys.__stdout__:
        buffer = io.BufferedWriter(_Output(out.fileno(), "w", closefd=False))
        sys.stdout = io.TextIOWrapper(buffer, out.encoding, out.errors, line_buffering=True)


def check_json(target: str | None) -> None:
    """Raises PacelineError if figures cannot be written, before the work is done."""
    if target is not None and target != "-":
        if not Path(target).absolute().parent.is_dir():
            raise PacelineError(f"cannot write {target}: its directory does not exist; make it first")
        check_place(target)


def write_json(target: str | None, content: Any, indent: int | None = None) -> None:
    """To a file, to standard output for "-", or nowhere; null for what is infinite or no number."""
    if target is not None:
        from paceline.runs.record import plain  # which loads numpy

        write_text(target, json.dumps(plain(content), indent=indent, allow_nan=False))


def write_text(target: str | None, text: str) -> None:
    """Write figures that are text already; ``target`` as for ``write_json``."""
    if target == "-":
        sys.stdout.write(text + "\n")
    elif target is not None:
        write_whole(target, text + "\n")
