"""A round as one rank measures it, and the stopwatch that does.

A round's stopwatch starts when its first micro-batch is requested (loading is work too) and stops when the last
gradient is ready, before this rank waits for those of others. On a GPU (written for, not yet run on one) start and
stop are events on the stream, read a round later, so that nothing on the training path waits for the device.
"""

from __future__ import annotations

import math
from time import perf_counter
from typing import Any, Protocol

import numpy as np
import torch

from paceline.rounds import Array
from paceline.torch import timing
from paceline.torch.plan import Piece, RoundPlan

NO_LOSS = math.nan  # the loss of a round before one was reported; compared by identity


class OpenRound:
    """A round on this rank, from its first micro-batch until the reports of all ranks are collected. Only its methods
    change it."""

    plan: RoundPlan
    reading: Any = None  # the stopwatch's, once the round's last gradient is ready
    loss: torch.Tensor | float = NO_LOSS  # so far, summed over the rank's samples; on a device a tensor
    model: torch.Tensor | float = math.nan  # ``Reports.model``, if the round is due
    count = math.nan  # what the loss is a sum over, if it is something other than samples
    pieces: list[float] | None = None  # the numbers of its ``piece_reports.ROW``
    samples = 0  # that this rank has run
    parts: Array = np.zeros(3)  # the sum of its samples' parts, see ``Deal.parts``
    learning_rate = math.nan  # of the first optimizer's first group
    ended = 0.0  # ``time.perf_counter`` after its step, 0 before
    stepping = 0.0  # seconds of its step,
    after = 0.0  # and of all steps after it, which count for the next round
    further = (
        False  # a loss was added after the gradients were ready: of another forward pass before the step
    )

    def __init__(self, step: int, epoch: int, began: float, carry: float, mark: Any) -> None:
        self.step, self.epoch, self.began, self.carry, self.mark = step, epoch, began, carry, mark

    @property
    def summed(self) -> float:
        """``time.perf_counter`` when the round's gradients were summed and its step began."""
        return self.ended - self.stepping

    @property
    def seconds(self) -> float:
        """Wall seconds of the round on this rank: like the rank's own work, with the step before it, not its own."""
        return self.carry + self.summed - self.began

    def add_loss(self, loss: torch.Tensor, factor: float = 1.0) -> None:
        """Add a micro-batch's loss. factor: makes a mean loss a sum over its samples."""
        if not factor:  # a mean over nothing, which is NaN
            added: Any = 0.0
        elif loss.is_cpu and not loss.ndim:
            added = loss.item() * factor  # in float64
        else:  # also in float64; the host does not wait for the device
            added = loss.detach().double().sum() * factor
        self.loss = added if self.loss is NO_LOSS else self.loss + added
        if self.reading is not None:
            self.further = True

    def back_to(self, loss: torch.Tensor | float, count: float) -> None:
        """The last pass has failed: what it has added is not the round's."""
        self.loss, self.count = loss, count

    def add_count(self, count: float) -> None:
        """A micro-batch's summed loss is over ``count`` tokens, nodes or the like."""
        self.count = count if math.isnan(self.count) else self.count + count

    def ran(self, piece: Piece) -> None:
        """This rank has run a piece."""
        self.samples += piece.samples
        if piece.parts is not None and piece.samples:
            self.parts = self.parts + piece.parts

    def waited(self, seconds: float) -> None:
        """Other ranks have held up the round for ``seconds``, which do not count for this rank."""
        self.mark += seconds

    def read(self, plan: RoundPlan, reading: Any, pieces: list[float] | None) -> None:
        """The round's plan, the stopwatch's reading, and the numbers of its ``piece_reports.ROW``, if pieces are
        reported."""
        self.plan, self.reading, self.pieces = plan, reading, pieces

    def reports(self, model: torch.Tensor | float) -> None:
        """The round is reported, in which the model has this number."""
        self.model = model

    def steps_at(self, learning_rate: float) -> None:
        """The learning rate of the round's step."""
        self.learning_rate = learning_rate

    def step_ended(self, seconds: float) -> None:
        """The round is over, after a step of ``seconds``."""
        self.stepping = self.after = seconds
        self.ended = perf_counter()

    def stepped_again(self, seconds: float) -> None:
        """Another optimizer has stepped for the round that is over."""
        self.after += seconds


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
        return perf_counter() - timing.waited

    def stop(self, mark: float) -> float:
        return perf_counter() - timing.waited - mark


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
