"""What a coded matrix has seen of its workers' pace, and the delay parameters that fit it."""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from paceline.coded.delay import ShiftedExponential
from paceline.coded.fit import fit
from paceline.coded.problem import Problem
from paceline.errors import PacelineError

HISTORY = 200  # products whose times are kept
ENOUGH = 5  # finished products of a worker before its parameters are fitted


class Observed(NamedTuple):
    """A worker's part in one product. per_row: milliseconds; finished: False where it is only a lower
    bound.
    """

    per_row: float
    finished: bool


class Observations:
    """The last products, by worker."""

    def __init__(self, workers: int) -> None:
        self.seen: list[deque[Observed]] = [deque(maxlen=HISTORY) for _ in range(workers)]

    def add(self, worker: int, milliseconds: float, rows: int, finished: bool) -> None:
        """Note that so many rows took so long, or would have taken longer."""
        self.seen[worker].append(Observed(milliseconds / rows, finished))

    def fitted(self, problem: Problem, master: int) -> Problem:
        """The problem with a master's delays as observed, called-off work included.

        Workers seen finishing fewer than five times keep their parameters. Raises PacelineError where the
        problem's delays are not shifted exponentials.
        """
        delay = problem.delay
        if not isinstance(delay, ShiftedExponential):
            raise PacelineError("observed times are fitted by shifted exponentials; make the plan with these")
        u, a = delay.u.copy(), delay.a.copy()
        for n, seen in enumerate(self.seen):
            done = [each.per_row for each in seen if each.finished]
            if len(done) < ENOUGH or min(done) == max(done):
                continue
            times, finished = np.empty((1,), object), np.empty((1,), object)
            times[0] = np.array([each.per_row for each in seen])
            finished[0] = np.array([each.finished for each in seen])
            found = fit(times, finished=finished).delay
            assert isinstance(found, ShiftedExponential)
            u[master, n], a[master, n] = found.u[0], found.a[0]
        return replace(problem, delay=ShiftedExponential(u, a))
