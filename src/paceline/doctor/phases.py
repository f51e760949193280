"""The time of a step: on one rank, the phases into which the hooks divide it without a gap; for a watched run, each
rank's typical step, the slow ranks and since when they are slow, and the form of the loop.

Times are those of the host, or of a GPU's stream, which runs after the host.
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
    """The wall clock: a computation on the processor ends when its call returns.

    ``mark`` notes a moment without waiting; ``between`` gives the seconds between two moments. lag: steps after which
    a marked moment is certain to have passed.
    """

    lag = 0

    def mark(self) -> Any:
        return time.perf_counter()

    def between(self, first: Any, second: Any) -> float:
        return float(second - first)


class StreamClock(HostClock):
    """A clock of events on the current stream. Host work that the device did not have to wait for takes no time here.
    event: makes a timing event; tests pass their own."""

    lag = 1

    def __init__(self, event: Any = None) -> None:
        if event is None:
            # Only this clock needs PyTorch, whose import delays a command by seconds.
            import torch

            event = partial(torch.cuda.Event, enable_timing=True)
        self._event = event

    def mark(self) -> Any:
        event = self._event()
        event.record()
        return event

    def between(self, first: Any, second: Any) -> float:
        if not second.query():  # the host is more than a step ahead of the device, so waiting costs nothing
            second.synchronize()
        return float(first.elapsed_time(second)) / 1e3


class Phase(IntEnum):
    """The phases of a step on a rank. All but ``REDUCE`` are the rank's own work.

    The wait in a collective that the script itself calls, in any phase, also counts as ``REDUCE``.

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
    """Divides a rank's time into phases. A step ends when its last all-reduce is done, which is at the same time on
    all ranks. The time from there to the end of the optimizer's step belongs to the next step, which it delays."""

    def __init__(self, clock: HostClock) -> None:
        self._clock = clock
        self._marks: list[tuple[Any, Phase]] = [(clock.mark(), Phase.PREPARE)]
        self._reduced = 0  # index of the mark at which the newest all-reduce ended; 0: none in this step

    @property
    def now(self) -> Phase:
        """The phase that the rank is in."""
        return self._marks[-1][1]

    def enter(self, phase: Phase) -> None:
        """Begin a phase."""
        if phase is not self._marks[-1][1]:
            self._marks.append((self._clock.mark(), phase))

    def reduced(self) -> None:
        """Note that an all-reduce is done."""
        self._marks.append((self._clock.mark(), Phase.FINISH))
        self._reduced = len(self._marks) - 1

    def go_on(self) -> None:
        """Count the time since an all-reduce as ``PREPARE`` of the next micro-batch if no optimizer step followed."""
        if self.now is Phase.FINISH:
            self._marks[-1] = (self._marks[-1][0], Phase.PREPARE)

    def close(self) -> list[tuple[Any, Phase]]:
        """The marks of the step, up to and including the end of the newest all-reduce; later ones are kept."""
        step, self._marks = self._marks[: self._reduced + 1], self._marks[self._reduced :]
        self._reduced = 0
        return step

    def seconds(self, step: list[tuple[Any, Phase]]) -> list[float]:
        """Seconds of each phase in a closed step, in the order of ``Phase``."""
        spent = [0.0] * len(Phase)
        for (begin, phase), (end, _) in pairwise(step):
            spent[phase] += max(self._clock.between(begin, end), 0.0)
        return spent


SLOWER = 1.15  # times the fastest rank's seconds per sample; ranks below that count as equally fast
ENOUGH = 10  # steps that are needed for a judgement


class Spent(NamedTuple):
    """The seconds of a typical step: medians over the steps since the last change of a rank's speed.

    steps: how many these are. step: the whole step. phases: each ``Phase``, shape (8, n). waiting: the wait for the
    slowest rank (``paceline.runs.run``), shape (n,). exchanging: from the slowest rank's last gradient to the end of
    the all-reduce. slowness: seconds per sample over the fastest rank's, shape (n,).
    """

    steps: int
    step: float
    phases: Array
    waiting: Array
    exchanging: float
    slowness: Array

    @property
    def computing(self) -> Array:
        """The forward pass, the backward pass and the time between them, shape (n,)."""
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


class LoopForm(NamedTuple):
    """The form of the training loop, as the hooks saw it.

    batch: samples of an optimizer step, all ranks together; ``sure``: whether they could be counted. backwards,
    exchanges: a rank's backward passes in an optimizer step, and those that exchange gradients. loader: ``processes``
    and ``stream`` of the DataLoader in use, None if there is none. host: the framework that runs the loop, "" for the
    script itself. lines: for each rank, the line that takes most of a phase, by the phase's name. places: file and
    line of the script at which rank 0 "made" the model, did "fetch", "backward" and "step". others: whether the loop
    steps several optimizers. compares: whether the loss compares samples with each other.
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
        """Samples of a backward pass if gradients are accumulated, else None."""
        return -(-self.batch // (ranks * self.backwards)) if self.backwards > 1 else None


def spent(run: Run) -> Spent:
    """The seconds of the typical step. Raises KeyError for a record that the doctor did not make."""
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


def loop(run: Run) -> LoopForm:
    """The form of the loop, from the ranks' last reports."""
    reports = [each for each in run.extras["loop"] if each is not None][-1]
    names = ("fetches", "backwards", "exchanges")
    fetches, *passes = (float(np.median(_matrix(run, "counts", name))) for name in names)
    backwards, exchanges = (max(round(count), 1) for count in passes)
    return LoopForm(
        int(np.median(run.batch)),
        backwards,
        exchanges,
        reports[0]["loader"] if fetches > 0 else None,
        reports[0]["host"],
        [each["lines"] for each in reports],
        all(each.get("sure", True) for each in reports),
        reports[0].get("places", {}),
        reports[0].get("others", False),
        any(each.get("compares") for each in reports),
    )


def _calm(run: Run) -> int:
    """The round since which no rank changed its speed; 0 if there are too few rounds since then."""
    since = max((change.round for change in changes(run)), default=0)
    return since if len(run.round) - since >= ENOUGH else 0


def _matrix(run: Run, group: str, name: str) -> Array:
    return np.array([row[name] for row in run.extras[group]], float)
