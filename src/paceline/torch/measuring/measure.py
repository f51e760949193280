"""How long a worker computed in a round, its waits for the others left out; and what its machine has to offer.

A round's clock starts when its first micro-batch is asked for (loading is work too) and stops when the last
gradient is ready, before it is waited for those of others; it stands still in every collective between. On a GPU
(written for, not yet run on one) the ends are events on the stream, read a round later, so that nothing on the
training path waits for the device.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import psutil
import torch

from paceline.torch import waits

_running_pass, _ENGINE = torch._C._current_graph_task_id, torch.autograd.Variable._execution_engine


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


class LastGradient:
    """Calls ``told`` when a backward pass is through, perhaps several times.

    A hook of each parameter tells of any pass, and costs each of them some microseconds. If the loss is known that
    the pass goes through (``begins`` before it, ``ended`` after it), one callback does: those that are queued in a
    pass are called one after the other when it is through, and DDP's, which waits for other ranks, is queued later.

    That does not hold where parameters get their gradients in a pass of their own within the pass, as under
    ``torch.utils.checkpoint`` with ``use_reentrant=True``: DDP may wait at the end of that one. So the first pass has
    the hooks as well, and they stay unless all of them were called in the pass of the loss.
    """

    def __init__(self, parameters: Sequence[torch.nn.Parameter], told: Callable[[], None]) -> None:
        self._parameters, self._told, self._key = parameters, told, id(self)
        self._hooks: Any = None
        # torch's number of the pass through a loss that is known, -1 until it begins
        self._pass: int | None = None
        self._within = self._apart = False  # gradients came in the pass of the loss; in another one
        self._hook()

    def begins(self, loss: torch.Tensor, told: Callable[[], None]) -> None:
        """The backward pass through this loss follows at once, on this thread; ``told`` is called when it is
        through, too."""
        first, self._queued = loss.grad_fn, told
        if first is None:
            self._pass = None
            return
        self._pass = -1
        # As ``loss.register_hook``, without the handle for its removal, which costs more than all the rest: it
        # stays with the loss, and does nothing in other passes.
        hooks: Any = loss._backward_hooks
        if hooks is None:
            loss._backward_hooks = hooks = OrderedDict()
            first._register_hook_dict(loss)
        hooks[self._key] = self._queue

    def ended(self) -> None:
        """A round's last backward pass is through, of which ``begins`` may have told."""
        number, self._pass = self._pass, None
        if number is None or number < 0:
            self._hook()  # a host runs the passes, through another loss
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
            self._pass = _running_pass()
            _ENGINE.queue_callback(self._queued)

    def _gradients(self, _: object) -> None:
        if self._pass is not None:
            within = _running_pass() == self._pass
            self._within, self._apart = self._within or within, self._apart or not within
        self._told()
