"""Coded blocks on their way to the workers, placed and dropped as a layout asks or not at all, and what was seen of
the workers' pace.

Apart from ``pool``, which each worker's process imports: this here takes longer.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import ray
from ray.exceptions import GetTimeoutError, RayActorError

from paceline.coded.codes import LT, MDS
from paceline.coded.delay import Array, ShiftedExponential
from paceline.coded.fit import fit
from paceline.coded.layout import Moves
from paceline.coded.problem import Problem
from paceline.errors import PacelineError, WorkerError

HISTORY = 200  # products whose times are kept
ENOUGH = 5  # finished products of a worker before its parameters are fitted
Actors = Sequence[Any]


def move(
    actors: Actors,
    names: Sequence[str],
    key: str,
    code: MDS | LT,
    a: Array,
    moves: Moves,
    gone: set[int],
    patience: float,
) -> None:
    """Place the new blocks of matrix ``a``, then drop the old ones.

    actors, names: by worker; gone: workers known to be dead, to which those found dead are added; patience:
    seconds to wait for a worker. On failure what was placed is dropped again. Raises WorkerError if a
    worker is lost.
    """
    placed: list[int] = []
    waiting: list[tuple[int, Any]] = []

    def settle(n: int, answer: Any) -> None:
        try:
            ray.get(answer, timeout=patience)
        except (RayActorError, GetTimeoutError) as error:
            gone.add(n)
            raise WorkerError(
                f"worker {names[n]!r} was lost while its blocks were placed: start it again or plan without it"
            ) from error

    try:
        for n, indices in enumerate(moves.place):
            if indices:
                blocks = ray.put(np.stack(code.encode(a, indices)))
                placed.append(n)
                waiting.append((n, actors[n].place.remote(key, indices, blocks)))
                # one set of blocks under way beside the one being made bounds the memory
                if len(waiting) > 1:
                    settle(*waiting.pop(0))
        for n, answer in waiting:
            settle(n, answer)
    except BaseException:
        drop(actors, key, placed, moves.place, gone)
        raise
    drop(actors, key, range(len(moves.drop)), moves.drop, gone)


def drop(
    actors: Actors,
    key: str,
    workers: Iterable[int],
    blocks: tuple[tuple[int, ...], ...],
    gone: Collection[int],
) -> None:
    """Have workers forget blocks, without waiting."""
    for n in workers:
        if blocks[n] and n not in gone:
            actors[n].drop.remote(key, blocks[n])


class Observed(NamedTuple):
    """A worker's part in one product. per_row: milliseconds; finished: False if it is only a lower bound."""

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

        Workers seen finishing fewer than five times keep their parameters. Raises PacelineError if the
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
