"""A round's samples dealt to the workers: which worker runs which samples, in which micro-batches, and at what cost.

    model = costs.model(padded=True)
    dealt = deal(costs.lengths[indices], model, pace)
    mine = indices[dealt.of(rank)]          # this rank's samples, micro-batch after micro-batch
    sizes = dealt.sizes[rank]               # samples of each of its micro-batches

The deal of a round is computed from the data and the plan alone, so every rank computes the same one.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from paceline.costs import Array, numbers
from paceline.errors import PacelineError, number, switches, whole
from paceline.samples.cost import CostModel, batch_parts, cost_of
from paceline.samples.divide import limited, longest_first
from paceline.samples.padded import Limits, sorted_runs

__all__ = ["Deal", "Room", "deal"]

Counts = NDArray[np.int64]
# The assumed cost of a launch if it is unknown and limits force cuts, as a part of a worker's mean cost.
GUESS = 0.25


class _Limits(NamedTuple):
    least: ArrayLike | None
    most: ArrayLike | None
    micro_batch: ArrayLike | None
    budget: float
    micro_steps: int | None
    lockstep: bool
    min_samples: int


class Room(_Limits):
    """Limits of a round and of a micro-batch.

    least, most: samples of each worker in the round, (n,) or a number; None for none and all.
    micro_batch: samples of a micro-batch at most, in the same form. budget: length of a micro-batch at most, in the
        user's unit: the sum of its lengths, or its size times the longest if it is padded.
    micro_steps: every worker takes exactly this many micro-batches, some of them empty. lockstep: all workers take
        the same number. min_samples: a worker with any samples has at least this many (batch norm needs 2).

    Raises:
        PacelineError: For anything else; ``_replace``, with which engines make each round's, checks nothing.
    """

    __slots__ = ()

    def __new__(
        cls,
        least: ArrayLike | None = None,
        most: ArrayLike | None = None,
        micro_batch: ArrayLike | None = None,
        budget: float = np.inf,
        micro_steps: int | None = None,
        lockstep: bool = False,
        min_samples: int = 1,
    ) -> Room:
        for name, value, fewest in (("least", least, 0), ("most", most, 0), ("micro_batch", micro_batch, 1)):
            if value is not None:
                numbers(name, value, f"samples, {fewest} or more, for all workers or for each", fewest)
        number("budget", budget, "a length of more than 0", lambda length: length > 0)
        whole("micro_steps", 1 if micro_steps is None else micro_steps)
        whole("min_samples", min_samples)
        switches(lockstep=lockstep)
        return super().__new__(cls, least, most, micro_batch, budget, micro_steps, lockstep, min_samples)

    def counts(self, workers: int, batch: int) -> tuple[Counts, Counts, Counts]:
        """The limits of each worker as arrays.

        Args:
            workers: Number of workers, n.
            batch: Samples of the round.

        Returns:
            Least, most and micro_batch, each of shape (n,), cut to the batch.

        Raises:
            PacelineError: For limits of another shape than the workers.
        """
        given = (0 if self.least is None else self.least, self.most, self.micro_batch)
        limits = [np.asarray(batch if each is None else each) for each in given]
        try:
            least, most, micro = (np.minimum(np.broadcast_to(each, workers), batch) for each in limits)
        except ValueError:
            shapes = ", ".join(str(each.shape) for each in limits)
            expected = f"expected a number, or one for each of {workers} workers"
            raise PacelineError(f"least, most and micro_batch have shapes {shapes}: {expected}") from None
        return least.astype(np.int64), most.astype(np.int64), micro.astype(np.int64)


@dataclass(frozen=True, eq=False)
class Deal:
    """The division of a round's B samples among the workers.

    Attributes:
        order: Positions among the round's samples, worker after worker, each one's micro-batches one after the
            other, (B,).
        loads: Samples of each worker, (n,).
        sizes: Samples of each micro-batch, for each worker; 0 for an empty micro-step.
        parts: (n, 3): lengths, squared lengths (padded if the model is) and launches of each worker.
        costs: Of each worker, (n,), in mean samples, with padding and known launches.
        lengths: Of the samples in ``order``, (B,).
        model: The cost model of the division.
    """

    order: Counts
    loads: Counts
    sizes: tuple[Counts, ...]
    parts: Array
    costs: Array
    lengths: Array
    model: CostModel

    @cached_property
    def starts(self) -> Counts:
        """Where each worker's part of ``order`` begins, (n + 1,)."""
        return np.concatenate(([0], np.cumsum(self.loads)))

    def of(self, worker: int) -> Counts:
        """The samples of one worker.

        Args:
            worker: A worker's number, from 0.

        Returns:
            Positions among the round's samples, micro-batch after micro-batch.
        """
        return self.order[self.starts[worker] : self.starts[worker + 1]]


def deal(
    lengths: Array,
    model: CostModel,
    pace: Array,
    overhead: Array | None = None,
    room: Room = Room(),  # noqa: B008  # immutable
) -> Deal:
    """Deal samples so that all workers end together, as nearly as whole samples allow.

    Args:
        lengths: Of the samples, positive, shape (B,).
        model: What a sample costs.
        pace: Seconds of each worker for a cost of 1, shape (n,), positive; infinite for a worker that gets nothing.
            Any unit is possible without ``overhead``.
        overhead: Seconds before a worker's first sample, shape (n,); default 0.
        room: The limits of loads and micro-batches.

    Returns:
        Each worker's samples and micro-batches.

    Raises:
        PacelineError: If the limits cannot hold the samples.
    """
    n, batch = len(pace), len(lengths)
    overhead = np.zeros(n) if overhead is None else overhead
    least, most, micro = room.counts(n, batch)
    if room.micro_steps is not None:
        most = np.minimum(most, room.micro_steps * micro)
    least, most = limited(batch, pace, least, most)
    budget = room.budget
    if batch and lengths.max() > budget:
        raise PacelineError(
            f"a sample of length {lengths.max():g} is longer than a micro-batch may be, "
            f"micro_batch_cost={budget:g}; raise it, or cut the sample"
        )
    fewest = room.min_samples
    enough = np.where(least > 0, np.minimum(np.maximum(least, fewest), most), 0)
    # In a short round, whose least loads have shrunk, not every worker can have so many.
    least = enough if enough.sum() <= batch else np.where(least >= fewest, least, 0)
    limits = Limits(least, most, micro, budget, room.micro_steps == 1)
    allowed, pace = pace, pace.copy()

    def divided() -> tuple[Counts, Counts, list[Counts]]:
        if model.padded and batch:
            return _padded(lengths, model, pace, overhead, limits, room.micro_steps)
        return _unpadded(lengths, model, pace, overhead, limits)

    order, loads, sizes = divided()
    while len(lone := np.flatnonzero((loads > 0) & (loads < fewest))) and np.isfinite(pace).sum() > 1:
        # Workers with too few samples get none, the slower half of these first; the others run theirs.
        pace[lone[np.argsort(-pace[lone], kind="stable")[: (len(lone) + 1) // 2]]] = np.inf
        limits = limits._replace(least=np.where(np.isfinite(pace), limits.least, 0))
        try:
            order, loads, sizes = divided()
        except PacelineError:  # the others have no room for these
            # The fewest workers with enough room get at least min_samples.
            roomy = np.lexsort((allowed, -most))
            few = roomy[: 1 + np.searchsorted(np.cumsum(most[roomy]), batch)]
            if most[few].min() < fewest or len(few) * fewest > batch:
                break  # no loads within the limits are all large enough
            pace = np.full(n, np.inf)
            pace[few] = allowed[few]
            limits = limits._replace(least=np.where(np.isfinite(pace), np.minimum(fewest, most), 0))
            with suppress(PacelineError):  # if a micro-batch's limits forbid it, the division before holds
                order, loads, sizes = divided()
            break
    sizes = [at_least(each, fewest) for each in sizes]
    micro_steps = room.micro_steps
    if room.lockstep and micro_steps is None:
        micro_steps = max(len(each) for each in sizes)
    if micro_steps is not None:
        sizes = [_split(each, micro_steps, fewest) for each in sizes]
    return dealt(order, lengths[order], loads, sizes, model)


def dealt(order: Counts, lengths: Array, loads: Counts, sizes: list[Counts], model: CostModel) -> Deal:
    """The deal of samples in this ``order`` with these ``lengths``, (B,), in micro-batches of ``sizes``.

    The samples after those of the workers are not dealt yet.
    """
    starts = np.cumsum(loads) - loads
    places = zip(starts, loads, sizes, strict=True)
    found = [batch_parts(lengths[at : at + load], each[each > 0], model.padded) for at, load, each in places]
    parts = np.array(found)
    return Deal(order, loads, tuple(sizes), parts, cost_of(model, parts), lengths, model)


def at_least(sizes: Counts, min_samples: int) -> Counts:
    """The same samples in micro-batches of at least ``min_samples`` each: a smaller one takes from the next, or joins
    it, which then has at most 2 min_samples - 1 samples."""
    cuts: list[int] = sizes.tolist()
    at = 0
    while min_samples > 1 and at < len(cuts) and len(cuts) > 1:
        owed = min_samples - cuts[at]
        if owed <= 0:
            at += 1
            continue
        first = min(at, len(cuts) - 2)  # the first of the two that share their samples
        both = cuts[first] + cuts[first + 1]
        if both < 2 * min_samples:
            cuts[first : first + 2] = [both]
        else:
            cuts[first : first + 2] = (
                [min_samples, both - min_samples] if first == at else [both - min_samples, min_samples]
            )
        at = first
    return np.array(cuts, np.int64)


def _unpadded(
    lengths: Array, model: CostModel, pace: Array, overhead: Array, limits: Limits
) -> tuple[Counts, Counts, list[Counts]]:
    costs = model.of(lengths)
    who = longest_first(costs, pace, overhead, limits.least, limits.most)
    loads = np.bincount(who, minlength=len(pace)).astype(np.int64)
    order = np.argsort(who, kind="stable")
    sizes, start = [], 0
    for worker, load in enumerate(loads.tolist()):
        mine = order[start : start + load]
        cuts, again = _cut(costs[mine], lengths[mine], int(limits.micro_batch[worker]), limits.budget)
        order[start : start + load] = mine[again]
        sizes.append(cuts)
        start += load
    return order, loads, sizes


def _cut(costs: Array, lengths: Array, most: int, budget: float) -> tuple[Counts, Counts]:
    """Sizes of the fewest micro-batches of nearly equal cost within the limits, and the order of their samples."""
    load = len(costs)
    if not load:
        return np.zeros(0, np.int64), np.zeros(0, np.int64)
    count = max(-(-load // most), int(np.ceil(lengths.sum() / budget)) if np.isfinite(budget) else 1)
    while True:
        if count <= 1:
            return np.array([load]), np.arange(load)
        who = longest_first(costs, np.ones(count), most=np.full(count, most))
        if np.bincount(who, weights=lengths, minlength=count).max() <= budget:
            break
        count += 1
    sizes = np.bincount(who, minlength=count)
    return sizes[sizes > 0].astype(np.int64), np.argsort(who, kind="stable")


def _padded(
    lengths: Array, model: CostModel, pace: Array, overhead: Array, limits: Limits, micro_steps: int | None
) -> tuple[Counts, Counts, list[Counts]]:
    order = np.argsort(-lengths, kind="stable")
    ordered = lengths[order]
    costs = model.of(ordered)
    launch = model.launch
    if launch is None:
        free = not np.isfinite(limits.budget) and limits.micro_batch.min() >= len(lengths)
        limits = limits._replace(one=limits.one or free)
        launch = GUESS * float(costs.sum()) / len(pace)
    workers, sizes = sorted_runs(costs, ordered, launch, pace, overhead, limits)
    while micro_steps is not None and (most := max(map(len, sizes))) > micro_steps:
        if launch > costs.sum():  # the limits of a micro-batch alone need more micro-steps
            raise PacelineError(
                f"micro_steps={micro_steps}: the round's samples need {most} micro-batches on a worker; raise the "
                "limits of a micro-batch, or the micro-steps"
            )
        launch = max(2 * launch, 1e-3 * float(costs.sum()) / len(pace))
        workers, sizes = sorted_runs(costs, ordered, launch, pace, overhead, limits)
    loads = np.array([each.sum() for each in sizes], np.int64)
    runs = np.split(order, np.cumsum(loads[workers])[:-1])
    return np.concatenate([runs[place] for place in np.argsort(workers).tolist()]), loads, sizes


def _split(sizes: Counts, micro_steps: int, min_samples: int = 1) -> Counts:
    """The same samples in exactly ``micro_steps`` micro-steps: the largest micro-batches are halved as long as both
    halves have ``min_samples`` samples, and the remaining micro-steps are empty."""
    cuts = sizes.tolist()
    while len(cuts) < micro_steps and max(cuts, default=0) >= 2 * min_samples:
        largest = cuts.index(max(cuts))
        half = cuts[largest] // 2
        cuts[largest : largest + 1] = [cuts[largest] - half, half]
    return np.array(cuts + [0] * (micro_steps - len(cuts)), np.int64)
