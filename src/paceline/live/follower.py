"""One run directory, followed for any number of pages: read and drawn once for all of them."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections import OrderedDict
from pathlib import Path
from typing import Any, NamedTuple

from paceline.live import now, panel
from paceline.live.tail import Tail
from paceline.runs import charts, sections
from paceline.runs.columns import RECENT
from paceline.runs.findings import findings
from paceline.runs.page import points
from paceline.runs.words import plural

POLL = 0.25  # seconds between two looks at the directory
READING = 0.4  # seconds of reading a long record between two panels
JUDGE = 2.0  # seconds between two judgements of what balancing saves
KEPT = 8  # stretches of the run that are kept drawn


class Shot(NamedTuple):
    """The panel as of ``id``, which changes when it does; ``data`` is its JSON."""

    id: str
    data: str


class Follower:
    """Polled while a page asks, idle otherwise; callable from many tasks."""

    def __init__(self, run_dir: Path) -> None:
        self._tail = Tail(run_dir)
        self._lock = threading.Lock()  # the tail is read by one thread at a time, and never while it grows
        self._polling = asyncio.Lock()
        self._polled = self._judged = 0.0
        self._saving: now.Saving | None = None
        self._speeds: list[str] = []
        self._shot = Shot("", "")
        self._drawn: OrderedDict[tuple[Any, ...], str] = OrderedDict()
        self._findings: tuple[str, str] = ("", "")

    async def shot(self) -> Shot:
        """The newest panel, at most ``POLL`` seconds old."""
        async with self._polling:
            if time.monotonic() - self._polled >= POLL or not self._shot.id:
                self._shot = await asyncio.to_thread(self._look)
                self._polled = time.monotonic()
            return self._shot

    async def figures(self, first: float | None, last: float | None, newest: int | None) -> str:
        """The charts of the rounds from ``first`` up to and without ``last``, or of the newest so many, as JSON."""
        await self.shot()
        return await asyncio.to_thread(self._draw, first, last, newest)

    def _look(self) -> Shot:
        with self._lock:
            end = time.monotonic() + READING
            changed = self._tail.poll()
            while self._tail.more and time.monotonic() < end:
                self._tail.poll()
            word, _ = panel.state(self._tail)
            mark = f"{self._tail.mark}-{word}"
            if not changed and mark == self._shot.id:
                return self._shot
            if time.monotonic() - self._judged >= JUDGE or word == "finished":
                self._saving = now.saving(self._tail.columns)
                self._speeds = now.speeds(self._tail.columns)
                self._judged = time.monotonic()
            content = panel.panel(self._tail, self._saving, self._speeds)
            content["findings"] = self._found(mark) if word == "finished" else ""
            return Shot(mark, _json(content))

    def _found(self, mark: str) -> str:
        """What the report of a finished run says."""
        if self._findings[0] != mark:
            columns = self._tail.columns
            self._findings = (mark, points(findings(columns.part(0, len(columns)))))
        return self._findings[1]

    def _draw(self, first: float | None, last: float | None, newest: int | None) -> str:
        with self._lock:
            columns = self._tail.columns
            if not len(columns):
                return _json({"rounds": 0, "span": [], "overview": "", "charts": [], "says": ""})
            if newest is not None:
                start, end = max(len(columns) - newest, 0), len(columns)
            else:
                start, end = columns.places(first, last)
            key = (self._tail.mark, start, end)
            if key not in self._drawn:
                rounds = columns["round"]
                span = [int(rounds[start]), int(rounds[end - 1]) + 1]
                says = (
                    f"All {plural(len(columns), 'round')}"
                    if end - start == len(columns)
                    else f"Rounds {span[0]:,} to {span[1] - 1:,} of {len(columns):,}"
                )
                self._drawn[key] = _json(
                    {
                        "rounds": len(columns),
                        "span": span,
                        "whole": [int(rounds[0]), int(rounds[-1]) + 1],
                        "says": says,
                        "overview": charts.overview(columns.window(recent=1)),
                        "charts": sections.figures(columns, start, end, RECENT),
                    }
                )
                while len(self._drawn) > KEPT:
                    self._drawn.popitem(last=False)
            return self._drawn[key]


def _json(content: dict[str, Any]) -> str:
    return json.dumps(content, separators=(",", ":"), ensure_ascii=False)
