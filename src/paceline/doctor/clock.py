"""Moments in a training loop: of the host, or on a GPU's stream, which does its work later than it is asked to
(written for GPUs, not yet run on one)."""

from __future__ import annotations

import time
from typing import Any, Protocol

import torch


class Clock(Protocol):
    """``mark`` notes a moment without waiting; ``between`` gives the seconds from one moment to another.

    lag: steps after which a moment is certain to have passed.
    """

    lag: int

    def mark(self) -> Any: ...

    def between(self, first: Any, second: Any) -> float: ...


class HostClock:
    """Wall clock: a computation on the processor ends when its call returns."""

    lag = 0

    def mark(self) -> float:
        return time.perf_counter()

    def between(self, first: float, second: float) -> float:
        return second - first


class StreamClock:
    """Events on the current stream. Work of the host that the device did not have to wait for takes no time here.

    event: makes a timing event; a test hands in its own.
    """

    lag = 1

    def __init__(self, event: Any = None) -> None:
        self._event = event or (lambda: torch.cuda.Event(enable_timing=True))

    def mark(self) -> Any:
        event = self._event()
        event.record()
        return event

    def between(self, first: Any, second: Any) -> float:
        if not second.query():  # the host ran more than a step ahead of the device: then waiting is right
            second.synchronize()
        return float(first.elapsed_time(second)) / 1e3


def clock(device: torch.device) -> Clock:
    """The clock for a model on this device."""
    return StreamClock() if device.type == "cuda" else HostClock()
