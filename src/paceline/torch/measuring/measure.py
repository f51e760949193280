"""How long a worker computed in a round, its waits for the others left out; and what its machine has to offer.

A round's clock starts when its first micro-batch is asked for (loading is work too) and stops when the last
gradient is ready, before it is waited for those of others; it stands still in every collective between. On a GPU
(written for, not yet run on one) the ends are events on the stream, read a round later, so that nothing on the
training path waits for the device.
"""

from __future__ import annotations

import time
from typing import Any, Protocol

import psutil
import torch

from paceline.torch import waits


class Stopwatch(Protocol):
    """``start`` gives a mark, ``stop`` makes a reading of it, and ``lag`` rounds later its ``seconds`` are known."""

    lag: int

    def start(self) -> Any: ...

    def stop(self, mark: Any) -> Any: ...

    def seconds(self, reading: Any) -> float: ...

    def close(self) -> None:
        """No more readings."""
        ...


class CpuStopwatch:
    """The host's clock without its waits: a computation there ends when its call returns."""

    lag = 0
    start, seconds = staticmethod(waits.now), staticmethod(float)

    def __init__(self) -> None:
        self.close = waits.listen(_nothing, _nothing)  # so that waits are noticed

    def stop(self, mark: float) -> float:
        return waits.now() - mark


class CudaStopwatch:
    """Events on the current stream. The start event lies behind the previous round's work, so the wait for its
    all-reduce is left out, and so is what lies between the two events around each collective; the reading is taken a
    round later, when the events have long passed.

    event: makes a timing event; a test hands in its own.
    """

    lag = 1

    def __init__(self, event: Any = None) -> None:
        self._event = event or (lambda: torch.cuda.Event(enable_timing=True))
        self._around: list[Any] = []  # events at both ends of each wait since the newest start
        self.close = waits.listen(self._wait, self._wait)

    def start(self) -> Any:
        self._around = []
        return self._mark()

    def stop(self, mark: Any) -> Any:
        around, self._around = self._around, []
        return mark, self._mark(), around

    def seconds(self, reading: Any) -> float:
        began, ended, around = reading
        if (
            not ended.query()
        ):  # the host ran a whole round ahead of the device: rare, and then waiting is right
            ended.synchronize()
        waited = sum(first.elapsed_time(last) for first, last in zip(around[::2], around[1::2], strict=False))
        return float(began.elapsed_time(ended) - waited) / 1e3

    def _mark(self) -> Any:
        mark = self._event()
        mark.record()
        return mark

    def _wait(self, *_: object) -> None:
        self._around.append(self._mark())


def _nothing(*_: object) -> None: ...


class Readings:
    """What this machine has to offer the next round: processors and memory, for forecasts that read them.

    Each reading covers the time since the last one, the first the time since this was made.

    Other processes of the same job, its loaders among them, count as others: what they take is not there.
    """

    def __init__(self) -> None:
        self._process = psutil.Process()
        self._processors = psutil.cpu_count() or 1
        self._last = time.perf_counter(), self._spent()
        psutil.cpu_percent(interval=None)

    def take(self) -> tuple[float, float]:
        """(portion of the processors that others left to this process, portion of memory that is free)."""
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


def stopwatch(device: torch.device) -> Stopwatch:
    """The stopwatch for the device the model is on."""
    return CudaStopwatch() if device.type == "cuda" else CpuStopwatch()
