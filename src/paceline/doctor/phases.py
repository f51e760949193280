"""Where a step's time goes on one rank: what the hooks saw, in phases that follow one another without a gap."""

from __future__ import annotations

from enum import IntEnum
from itertools import pairwise
from typing import Any

from paceline.doctor.clock import Clock


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
