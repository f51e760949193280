"""Live progress of a run: a bar on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import time
from types import TracebackType
from typing import Any, Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

LINE_EVERY_SECONDS = 5.0


class Progress:
    """Takes the events of a training run and shows them; use it as a context and call it with each event."""

    def __init__(self, console: Console, label: str) -> None:
        self._console, self._label = console, label
        self._bar = Bar(
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[note]}"),
            console=console,
            disable=not console.is_terminal,
        )
        self._task = self._bar.add_task(label, total=None, note="starting workers")
        self._last_line = time.monotonic()

    def __call__(self, event: dict[str, Any]) -> None:
        if event["type"] == "start":
            self._bar.update(self._task, total=event["rounds"], completed=event["first"], note="")
        elif event["type"] == "note":
            self._console.print(event["text"], markup=False)
        elif event["type"] == "test":
            self._bar.update(self._task, note="testing")
        elif event["type"] == "round":
            loads = "/".join(str(load) for load in event["loads"][:8]) + (
                "..." if len(event["loads"]) > 8 else ""
            )
            note = f"loss {event['loss']:.3f}  {event['seconds'] * 1e3:.0f} ms  loads {loads}"
            done, total = event["round"] + 1, event["rounds"]
            self._bar.update(self._task, completed=done, note=note)
            now = time.monotonic()
            if not self._console.is_terminal and (
                now - self._last_line > LINE_EVERY_SECONDS or done == total
            ):
                self._last_line = now
                self._console.print(f"{self._label}  step {done}/{total}  {note}")

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._bar.stop()
