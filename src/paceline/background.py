"""Work beside the training: one thread at low priority, whose result is taken in a round later."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")
NICE = 10  # of 19: the thread yields to whatever else wants the processor


class BackgroundDecision:
    """Carries out one call after another, in the order in which they were handed over."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="paceline-aside", initializer=_step_back)

    def start(self, call: Callable[[], T]) -> Future[T]:
        """Hand over; returns at once. The future gives the result, or raises what the call raised."""
        return self._thread.submit(call)


def _step_back() -> None:
    with contextlib.suppress(AttributeError, OSError):
        # on Linux this is the thread's own priority; elsewhere a thread has none
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICE)
