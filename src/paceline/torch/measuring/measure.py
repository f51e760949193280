"""Measures how long a worker computes in a round, without its waits for the others, and its machine's free resources.

A round's stopwatch starts when its first micro-batch is requested (loading is work too) and stops when the last
gradient is ready, before this rank waits for those of others; it is paused during every collective between. On a GPU
(written for, not yet run on one) start and stop are events on the stream, read a round later, so that nothing on the
training path waits for the device.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import psutil
import torch

from paceline.torch import waits
from paceline.torch.hooks_of_torch import at_end_of_pass, call_in_pass, running_pass


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
    start, seconds = staticmethod(waits.now), staticmethod(float)

    def __init__(self) -> None:
        self.close = waits.listen(_nothing, _nothing)  # a listener makes ``waits.now`` leave out waits

    def stop(self, mark: float) -> float:
        return waits.now() - mark


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
        self.close = waits.listen(self._wait, self._wait)

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


def stopwatch(device: torch.device) -> Stopwatch:
    """The stopwatch for the device the model is on."""
    return CudaStopwatch() if device.type == "cuda" else CpuStopwatch()


class LastGradient:
    """Calls ``notify`` at the end of a backward pass, perhaps several times.

    A hook on each parameter notices any pass, and costs some microseconds for each parameter. If the loss that the
    pass starts from is known (``begins`` before it, ``ended`` after it), one callback is enough: callbacks queued in
    a pass are called one after the other at its end, and DDP's, which waits for other ranks, is queued later.

    That does not hold if parameters get their gradients in a nested pass of their own, as under
    ``torch.utils.checkpoint`` with ``use_reentrant=True``: DDP may wait at the end of that one. So the first pass has
    the hooks as well, and they stay unless all of them were called in the pass of the loss.
    """

    def __init__(self, parameters: Sequence[torch.nn.Parameter], notify: Callable[[], None]) -> None:
        self._parameters, self._notify, self._key = parameters, notify, id(self)
        self._hooks: Any = None
        # torch's number of the pass through a loss that is known: -1 until it begins, None if no loss is known
        self._pass: int | None = None
        self._within = self._apart = False  # gradients came in the pass of the loss; in another one
        self._hook()

    def begins(self, loss: torch.Tensor, notify: Callable[[], None]) -> None:
        """The backward pass through this loss follows at once, on this thread; this ``notify`` is also called at its
        end."""
        first, self._queued = loss.grad_fn, notify
        if first is None:
            self._pass = None
            return
        self._pass = -1
        call_in_pass(loss, first, self._key, self._queue)  # it does nothing in other passes

    def ended(self) -> None:
        """A round's last backward pass is done; ``begins`` may have announced it."""
        number, self._pass = self._pass, None
        if number is None or number < 0:
            self._hook()  # the pass was not that of an announced loss: a host runs the passes
        elif self._hooks is not None and self._within and not self._apart:
            self._hooks.remove()
            self._hooks = None

    def remove(self) -> None:
        """Let go of the model."""
        self._pass = None
        if self._hooks is not None:
            self._hooks.remove()

    def _hook(self) -> None:
        if self._hooks is None:
            self._hooks = torch.autograd.graph.register_multi_grad_hook(self._parameters, self._gradients)

    def _queue(self, *_: object) -> None:
        if self._pass == -1:
            self._pass = running_pass()
            at_end_of_pass(self._queued)

    def _gradients(self, _: object) -> None:
        if self._pass is not None:
            within = running_pass() == self._pass
            self._within, self._apart = self._within or within, self._apart or not within
        self._notify()
