"""Where a step's time goes on one rank: what the hooks saw, in phases that follow one another without a gap.

Moments are those of the host, or of a GPU's stream, which does its work later than it is asked to (written for GPUs,
not yet run on one).
"""

from __future__ import annotations

import time
from enum import IntEnum
from itertools import pairwise
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


class Phase(IntEnum):
    """What a rank is at. All but ``REDUCE`` is its own work.

    Where the script calls a collective of its own, in whatever phase, its wait counts as ``REDUCE``, too.

    FETCH: in a DataLoader's ``next``. PREPARE: the script's own code before the forward pass. MOVE: copying tensors
    to the model's device. FORWARD: the forward pass. BETWEEN: after it, before the backward pass (the loss, and the
    script's code there). BACKWARD: until the last gradient is ready. REDUCE: until the all-reduce is done. FINISH:
    from there to the end of the optimizer's step.
    """

    FETCH = 0
    PREPARE = 1
    MOVE = 2
    FORWARD = 3
    BETWEEN = 4
    BACKWARD = 5
    REDUCE = 6
    FINISH = 7


class Phases:
    """Cuts a rank's time into phases; a step ends when its last all-reduce is done, when all ranks are level.

    What follows up to the end of the optimizer's step belongs to the next step, whose ranks it makes late.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._marks: list[tuple[Any, Phase]] = [(clock.mark(), Phase.PREPARE)]
        self._reduced = 0  # where in the marks the newest all-reduce ended; 0: in none of this step

    @property
    def now(self) -> Phase:
        """The phase that the rank is in."""
        return self._marks[-1][1]

    def enter(self, phase: Phase) -> None:
        """A phase begins."""
        if phase is not self._marks[-1][1]:
            self._marks.append((self._clock.mark(), phase))

    def reduced(self) -> None:
        """An all-reduce is done."""
        self._marks.append((self._clock.mark(), Phase.FINISH))
        self._reduced = len(self._marks) - 1

    def go_on(self) -> None:
        """No optimizer's step followed the all-reduce: what came after it was already the next micro-batch's."""
        if self.now is Phase.FINISH:
            self._marks[-1] = (self._marks[-1][0], Phase.PREPARE)

    def close(self) -> list[tuple[Any, Phase]]:
        """The marks of the step that ended with the newest all-reduce, that moment included; the rest is kept."""
        step, self._marks = self._marks[: self._reduced + 1], self._marks[self._reduced :]
        self._reduced = 0
        return step

    def seconds(self, step: list[tuple[Any, Phase]]) -> list[float]:
        """Seconds of each phase in a closed step, in the order of ``Phase``."""
        spent = [0.0] * len(Phase)
        for (begin, phase), (end, _) in pairwise(step):
            spent[phase] += max(self._clock.between(begin, end), 0.0)
        return spent
