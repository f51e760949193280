"""Where a step's time goes: on one rank, as the hooks saw it, in phases that follow one another without a gap; and in
figures of a watched run: each rank's typical step, who is slow and since when, and what loop it is.

Moments are those of the host, or of a GPU's stream, which does its work later than it is asked to (written for GPUs,
not yet run on one).
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from enum import IntEnum
from functools import partial
from itertools import pairwise
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from paceline.rounds import Array
from paceline.runs import Run
from paceline.runs.run import waits
from paceline.runs.summary import changes, median, seconds_per_sample


class HostClock:
    """Wall clock: a computation on the processor ends when its call returns.

    ``mark`` notes a moment without waiting; ``between`` gives the seconds from one moment to another. lag: steps
    after which a moment is certain to have passed.
    """

    lag = 0

    def mark(self) -> Any:
        return time.perf_counter()

    def between(self, first: Any, second: Any) -> float:
        return float(second - first)


class StreamClock(HostClock):
    """Events on the current stream. Work of the host that the device did not have to wait for takes no time here.

    event: makes a timing event; a test hands in its own.
    """

    lag = 1

    def __init__(self, event: Any = None) -> None:
        if event is None:
            # Of the clocks and figures here this alone needs PyTorch, whose import delays a command by seconds.
            import torch

            event = partial(torch.cuda.Event, enable_timing=True)
        self._event = event

    def mark(self) -> Any:
        event = self._event()
        event.record()
        return event

    def between(self, first: Any, second: Any) -> float:
        if not second.query():  # the host ran more than a step ahead of the device: then waiting is right
            second.synchronize()
        return float(first.elapsed_time(second)) / 1e3


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

    def __init__(self, clock: HostClock) -> None:
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


SLOWER = 1.15  # times the fastest rank's seconds per sample: ranks below that are called equally fast
ENOUGH = 10  # steps to judge by


class Spent(NamedTuple):
    """Where a typical step goes, in seconds: medians over the steps since the last change of a rank's speed.

    steps: how many those are. step: of the whole step. phases: of each ``Phase``, shape (8, n). waiting: for the
    slowest rank (``paceline.runs.run``), shape (n,). exchanging: from the slowest rank's last gradient to the end
    of the all-reduce. slowness: seconds per sample over the fastest rank's, shape (n,).
    """

    steps: int
    step: float
    phases: Array
    waiting: Array
    exchanging: float
    slowness: Array

    @property
    def computing(self) -> Array:
        """The forward and the backward pass and what lies between them, shape (n,)."""
        return np.asarray(self.phases[[Phase.FORWARD, Phase.BETWEEN, Phase.BACKWARD]].sum(axis=0))

    @property
    def own(self) -> Array:
        """All but the all-reduce, shape (n,)."""
        return np.asarray(np.delete(self.phases, Phase.REDUCE, axis=0).sum(axis=0))


class Slow(NamedTuple):
    """A rank whose samples take ``ratio`` times the fastest rank's time, since round ``since`` of the record."""

    rank: int
    ratio: float
    since: int


class Loop(NamedTuple):
    """What the hooks saw of the training loop.

    batch: samples of an optimizer step, all ranks together; ``sure``: whether they could be counted. backwards,
    exchanges: a rank's backward passes in an optimizer step, and those that exchange gradients. loader: of the
    DataLoader in use, None where there is none: ``processes`` and ``stream``. host: the framework whose loop it is,
    "" for the script's own. lines: of each rank, the line that a phase mostly went into, by the phase's name.
    places: file and line of the script at which rank 0 "made" the model, did "fetch", "backward" and "step". others:
    whether it steps several optimizers. compares: whether its loss compares samples with each other.
    """

    batch: int
    backwards: int
    exchanges: int
    loader: dict[str, Any] | None
    host: str
    lines: list[dict[str, str]]
    sure: bool = True
    places: Mapping[str, tuple[str, int]] = MappingProxyType({})
    others: bool = False
    compares: bool = False

    def micro_batch(self, ranks: int) -> int | None:
        """Samples of a backward pass where gradients are accumulated, else None."""
        return -(-self.batch // (ranks * self.backwards)) if self.backwards > 1 else None


def spent(run: Run) -> Spent:
    """The typical step. Raises KeyError for a record that no doctor made."""
    since = _calm(run)
    whole = slice(since, None)
    phases = np.stack([_matrix(run, "phases", phase.name)[whole] for phase in Phase])
    last = np.nanmax(run.compute[whole], axis=1)
    own = median(seconds_per_sample(run)[whole])
    return Spent(
        len(run.round) - since,
        float(np.median(run.seconds[whole])),
        np.stack([median(each) for each in phases]),
        median(waits(run.seconds[whole], run.compute[whole])),
        float(np.median(np.maximum(run.seconds[whole] - last, 0.0))),
        own / np.nanmin(own),
    )


def slow(run: Run) -> list[Slow]:
    """Ranks that are slow until the end of the record, the slowest first."""
    start = _calm(run)
    own = seconds_per_sample(run)[start:]
    middle = max(len(own) // 2, 1)
    halves = [median(part) for part in (own[:middle], own[-middle:])]
    with np.errstate(invalid="ignore"):
        steady = np.logical_and.reduce([half >= SLOWER * np.nanmin(half) for half in halves])
        ratios = median(own) / np.nanmin(median(own))
    since = {change.worker: change.round for change in changes(run) if change.ratio > 1}
    lasting = np.flatnonzero(steady & (ratios >= SLOWER))
    found = [Slow(int(i), float(ratios[i]), since.get(int(i), 0)) for i in lasting]
    return sorted(found, key=lambda each: -each.ratio)


def loop(run: Run) -> Loop:
    """What loop it is, from what the ranks told last."""
    told = [each for each in run.extras["loop"] if each is not None][-1]
    names = ("fetches", "backwards", "exchanges")
    fetches, *passes = (float(np.median(_matrix(run, "counts", name))) for name in names)
    backwards, exchanges = (max(round(count), 1) for count in passes)
    return Loop(
        int(np.median(run.batch)),
        backwards,
        exchanges,
        told[0]["loader"] if fetches > 0 else None,
        told[0]["host"],
        [each["lines"] for each in told],
        all(each.get("sure", True) for each in told),
        told[0].get("places", {}),
        told[0].get("others", False),
        any(each.get("compares") for each in told),
    )


def _calm(run: Run) -> int:
    """Since which round no rank changed its speed; 0 where that is too short to judge by."""
    since = max((change.round for change in changes(run)), default=0)
    return since if len(run.round) - since >= ENOUGH else 0


def _matrix(run: Run, group: str, name: str) -> Array:
    return np.array([row[name] for row in run.extras[group]], float)
