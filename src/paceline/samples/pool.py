"""A round in pieces, by cost: the longest samples run at once, the next are claimed, the shortest come last.

    dealt = in_pieces(lengths, model, shares, at_once, least, room)
    mine = indices[dealt.own.of(rank)]      # this worker's micro-batches, the last of which it keeps for its end
    pool = dealt.pool                       # the rest, by falling length: claimed in pieces of a given cost

A claim is a run of the remaining samples, so that a piece meets its cost to within one sample, and the last pieces of
a round, which decide how far apart its workers end, consist of the shortest samples. Costs are without launches here:
the engine that claims measures in seconds what a piece costs beyond its samples.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import numpy as np

from paceline.costs import Array
from paceline.samples.cost import CostModel, batch_parts, cost_of
from paceline.samples.deal import GUESS, Counts, Deal, Room, at_least, deal, dealt
from paceline.samples.padded import best_cuts

__all__ = ["InPieces", "Pool", "in_pieces", "sizes_of_micro_steps"]


class Pool(NamedTuple):
    """The P samples that workers claim within a round, the longest first; all costs are in mean samples.

    Attributes:
        lengths: (P,).
        before: Cost of the samples before each place, (P + 1,), padded as in the best micro-batches.
        model: Their cost model.
        min_samples: Samples that a micro-batch needs; P is a multiple of it.
        budget: Length of a micro-batch at most, as ``Room.budget``.
    """

    lengths: Array
    before: Array
    model: CostModel
    min_samples: int
    budget: float

    def left(self, place: int) -> float:
        """Cost of all samples from ``place`` on.

        Args:
            place: A position in the pool, from 0.

        Returns:
            A cost in mean samples.
        """
        return float(self.before[-1] - self.before[min(place, len(self.lengths))])

    def samples(self, place: int, cost: float, room: int) -> int:
        """How many samples from ``place`` on have a cost nearest to ``cost``.

        Args:
            place: A position in the pool, from 0.
            cost: The wanted cost, in mean samples.
            room: Samples at most.

        Returns:
            A multiple of ``min_samples``, at least one; 0 if nothing is left, or there is no room.
        """
        room = min(room, len(self.lengths) - place) // self.min_samples * self.min_samples
        if room <= 0:
            return 0
        wanted = float(self.before[place]) + cost
        end = int(np.searchsorted(self.before, wanted))
        if end > place and end < len(self.before):
            end -= wanted - self.before[end - 1] < self.before[end] - wanted
        many = -(-max(end - place, 1) // self.min_samples) * self.min_samples
        return min(many, room)

    def cuts(self, place: int, samples: int, micro_batch: int) -> list[int]:
        """Cut samples from ``place`` on into micro-batches.

        Args:
            place: A position in the pool, from 0.
            samples: Number of samples.
            micro_batch: Samples of a micro-batch at most.

        Returns:
            Sizes of the micro-batches, in the samples' order.
        """
        lengths = self.lengths[place : place + samples]
        return sizes_of_micro_steps(lengths, self.model, micro_batch, self.budget, self.min_samples)

    def parts(self, place: int, size: int) -> Array:
        """What makes up the cost of one micro-batch.

        Args:
            place: A position in the pool, from 0.
            size: Samples of the micro-batch.

        Returns:
            Shape (3,), see ``Deal.parts``.
        """
        return batch_parts(self.lengths[place : place + size], np.array([size]), self.model.padded)


class InPieces(NamedTuple):
    """The beginning of a round in which work moves; n workers.

    Attributes:
        own: Each worker's micro-batches; the samples of the pool follow in ``own.order``.
        first: Samples that it runs at once, (n,).
        kept: Samples of its last micro-batch, which it keeps for its end, (n,).
        kept_costs: Cost of these samples, (n,).
        pool: The samples that are claimed.
        whole: Cost of the round.
    """

    own: Deal
    first: Counts
    kept: Counts
    kept_costs: Array
    pool: Pool
    whole: float


def micro_cost(model: CostModel, parts: Array) -> float:
    """Cost of parts without their launches."""
    return float(cost_of(replace(model, launch=None), parts))


def sizes_of_micro_steps(
    lengths: Array, model: CostModel, micro_batch: int, budget: float, min_samples: int = 1
) -> list[int]:
    """Cut samples into micro-batches: the best cuts if they are padded and the cost of a launch is known, otherwise
    the fewest within the limits.

    Args:
        lengths: Of the samples, the longest first, shape (B,).
        model: What a sample costs.
        micro_batch: Samples of a micro-batch at most.
        budget: Sum of the lengths of a micro-batch at most; if padded, its size times its longest sample's length.
        min_samples: Fewest samples of a micro-batch.

    Returns:
        Sizes of the micro-batches, in the samples' order.
    """
    if not len(lengths):
        return []
    if model.padded and model.launch is not None:
        sizes = best_cuts(model.of(lengths), lengths, model.launch, micro_batch, budget)
        return at_least(np.array(sizes), min_samples).tolist()
    tokens = None if model.padded else np.concatenate(([0.0], np.cumsum(lengths)))
    sizes, start = [], 0
    while start < len(lengths):
        size = len(lengths) - start
        if np.isfinite(budget):
            if tokens is None:
                size = min(size, int(budget / lengths[start]))
            else:
                size = min(size, int(np.searchsorted(tokens, tokens[start] + budget, "right")) - 1 - start)
        size = max(min(size, micro_batch), 1)
        sizes.append(size)
        start += size
    return at_least(np.array(sizes), min_samples).tolist()


def in_pieces(
    lengths: Array, model: CostModel, shares: Array, at_once: float, least: Array, room: Room
) -> InPieces | None:
    """Divide a round's samples into what each worker runs first and a pool from which workers claim.

    Args:
        lengths: Of the samples, shape (B,).
        model: What a sample costs.
        shares: Each worker's part of the round's cost, (n,).
        at_once: The portion of it that runs at once.
        least: Cost of the samples that each keeps for its end, (n,).
        room: The limits of loads and micro-batches.

    Returns:
        The beginning of the round; None if there is nothing to claim, or no room for it.
    """
    n, batch = len(shares), len(lengths)
    _, most, micro = room.counts(n, batch)
    budget = room.budget
    order = np.argsort(-lengths, kind="stable")
    ordered = lengths[order]
    before = _before(ordered, model, n, int(micro.max()), budget)
    kept = _kept(ordered, before, model, shares, least, np.minimum(micro, most), budget, room.min_samples)
    free = batch - int(kept.sum())
    first = min(int(np.searchsorted(before, at_once * before[-1])), free)
    first += (free - first) % room.min_samples
    first += room.min_samples if 0 < first < room.min_samples else 0
    if first >= free or np.any((kept > 0) & (kept < room.min_samples)):
        return None
    spare = np.minimum(most, batch) - kept
    if first:
        with np.errstate(divide="ignore"):
            pace = np.where(shares > 0, 1.0 / shares, np.inf)
        if spare[shares > 0].sum() < first:
            return None
        begin = deal(ordered[:first], model, pace, room=room._replace(least=0, most=spare))
        if np.any((begin.loads > 0) & (begin.loads < room.min_samples)):
            return None
        runs = [begin.of(worker) for worker in range(n)]
        cuts = [size.tolist() for size in begin.sizes]
    else:
        runs, cuts = [np.zeros(0, np.int64)] * n, [[] for _ in range(n)]
    spare = spare - np.array([len(run) for run in runs])
    if (
        spare // room.min_samples * room.min_samples
    ).sum() < free - first:  # the pool might not be claimed wholly
        return None
    end, own = batch, []
    for worker in range(n):
        end -= int(kept[worker])
        own.append(np.concatenate([runs[worker], np.arange(end, end + kept[worker])]).astype(np.int64))
        cuts[worker] = [size for size in (*cuts[worker], int(kept[worker])) if size]
    stand = np.concatenate([*own, np.arange(first, free)])
    loads = np.array([len(run) for run in own])
    mine = dealt(order[stand], ordered[stand], loads, [np.array(each, np.int64) for each in cuts], model)
    rest = Pool(
        ordered[first:free], before[first : free + 1] - before[first], model, room.min_samples, budget
    )
    starts, last = mine.starts, np.zeros(n)
    for worker in np.flatnonzero(kept).tolist():
        stop, size = int(starts[worker + 1]), int(kept[worker])
        parts = batch_parts(mine.lengths[stop - size : stop], np.array([size]), model.padded)
        last[worker] = micro_cost(model, parts)
    without = replace(model, launch=None)
    whole = float(cost_of(without, mine.parts).sum()) + rest.left(0)
    return InPieces(mine, loads - kept, kept, last, rest, whole)


def _before(ordered: Array, model: CostModel, workers: int, micro_batch: int, budget: float) -> Array:
    """Cost of the samples before each place, (B + 1,), padded as in the best micro-batches of all of them."""
    costs = model.of(ordered)
    if model.padded:
        guess = GUESS * float(costs.sum()) / workers
        cut = replace(model, launch=guess) if model.launch is None else model
        sizes = sizes_of_micro_steps(ordered, cut, micro_batch, budget)
        costs = np.repeat(costs[np.cumsum(sizes) - sizes], sizes)
    return np.concatenate(([0.0], np.cumsum(costs)))


def _kept(
    ordered: Array,
    before: Array,
    model: CostModel,
    shares: Array,
    least: Array,
    most: Counts,
    budget: float,
    min_samples: int,
) -> Counts:
    """How many of the shortest samples each worker keeps for its end, as one micro-batch, (n,); worker by worker."""
    end, kept = len(ordered), np.zeros(len(shares), np.int64)
    behind = np.concatenate(([0.0], np.cumsum(ordered)))
    for worker in range(len(shares)):
        if not shares[worker] > 0:
            continue
        wanted = min(float(least[worker]), float(shares[worker] * before[-1]))
        size = 0
        while end - size > 0 and size < most[worker]:
            longest = end - size - 1
            tokens = (size + 1) * ordered[longest] if model.padded else behind[end] - behind[longest]
            if size >= min_samples and (tokens > budget or before[end] - before[longest] > wanted):
                break
            size += 1
        kept[worker] = size
        end -= size
    return kept
