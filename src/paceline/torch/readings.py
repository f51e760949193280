"""What other processes leave of a machine's processors and memory."""

from __future__ import annotations

import time

import psutil


class Readings:
    """The processors and memory that this machine has free for the next round, for forecasts that read them.

    Each reading covers the time since the last one, the first one the time since construction.

    Other processes of the same job, such as its loaders, count as others: what they use is not free.
    """

    def __init__(self) -> None:
        self._process = psutil.Process()
        self._processors = psutil.cpu_count() or 1
        self._last = time.perf_counter(), self._spent()
        psutil.cpu_percent(interval=None)

    def take(self) -> tuple[float, float]:
        """(portion of the processors that other processes left to this one, portion of memory that is free)."""
        (before, spent), self._last = self._last, (time.perf_counter(), self._spent())
        busy = psutil.cpu_percent(interval=None) / 100
        span = (self._last[0] - before) * self._processors
        mine = (self._last[1] - spent) / span if span > 0 else 0.0
        others = min(max(busy - mine, 0.0), 1.0)
        return 1.0 - others, 1.0 - psutil.virtual_memory().percent / 100

    def _spent(self) -> float:
        """Processor seconds of this process so far."""
        times = self._process.cpu_times()
        return float(times.user + times.system)
