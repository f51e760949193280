"""The clocks of a rank's own work, which leave out its waits: one for the host, one for a device."""

from __future__ import annotations

import time
from typing import Any, Protocol

import torch

from paceline.torch import timing


class Stopwatch(Protocol):
    """``start`` returns a mark, ``stop`` makes a reading of it, whose ``seconds`` are known ``lag`` rounds later."""

    lag: int

    def start(self) -> Any: ...

    def stop(self, mark: Any) -> Any: ...

    def seconds(self, reading: Any) -> float: ...

    def close(self) -> None:
        """No more readings."""
        ...


class CpuStopwatch:
    """The host's clock without its waits: a computation on the host ends when its call returns."""

    lag = 0
    seconds = staticmethod(float)

    def __init__(self) -> None:
        self.close = timing.listen(_nothing, _nothing)  # a listener makes ``now`` leave out waits

    def start(self) -> float:
        return time.perf_counter() - timing.waited

    def stop(self, mark: float) -> float:
        return time.perf_counter() - timing.waited - mark


class CudaStopwatch:
    """Events on the current stream. The start event comes after the previous round's work, so the wait for its
    all-reduce is left out, and so is the time between the two events around each collective; the reading is taken a
    round later, when the events are complete.

    event: makes a timing event; a test passes its own.
    """

    lag = 1

    def __init__(self, event: Any = None) -> None:
        self._event = event or (lambda: torch.cuda.Event(enable_timing=True))
        self._around: list[Any] = []  # events at both ends of each wait since the newest start
        self.close = timing.listen(self._wait, self._wait)

    def start(self) -> Any:
        self._around = []
        return self._mark()

    def stop(self, mark: Any) -> Any:
        around, self._around = self._around, []
        return mark, self._mark(), around

    def seconds(self, reading: Any) -> float:
        began, ended, around = reading
        # The host ran a whole round ahead of the device: rare, and then waiting is right.
        if not ended.query():
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


def stopwatch(device: torch.device) -> Stopwatch:
    """The stopwatch for the device the model is on."""
    return CudaStopwatch() if device.type == "cuda" else CpuStopwatch()
