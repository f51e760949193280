"""Divides an epoch's samples into rounds, and each round among the ranks, consistently on every rank.

Round k of an epoch uses the next B entries of the epoch's permutation; rank r takes its slice of them, cut by
the running sum of the loads. So every sample is used exactly once an epoch, every rank takes the same number
of rounds, and the state that a checkpoint needs (epoch, samples done) does not depend on the number of ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from paceline.rounds import Array, Indices
from paceline.samples.cost import batch_parts
from paceline.torch.plan import Piece, RoundPlan
from paceline.torch.terms import Terms


@dataclass(frozen=True, slots=True)
class Order:
    """The order of the samples in each epoch: a permutation drawn from (seed, epoch), or that of the data set."""

    samples: int
    seed: int = 0
    shuffle: bool = True

    def epoch(self, epoch: int) -> Indices:
        """Sample indices in the order of use, int64, shape (samples,)."""
        if not self.shuffle:
            return np.arange(self.samples)
        return np.random.default_rng((self.seed, epoch)).permutation(self.samples)


# Samplers that draw each sample once, and batch samplers that cut their order; the last is sentence-transformers'.
ORDERS = ("SequentialSampler", "RandomSampler", "DistributedSampler", "SeedableRandomSampler")
CUTS = ("BatchSampler", "BatchSamplerShard", "DefaultBatchSampler")


def order_of(sampler: Any) -> tuple[Any, bool]:
    """The sampler inside batch samplers, which only cut its order; and whether balancing has that order, too."""
    while type(sampler).__name__ in CUTS:
        sampler = getattr(sampler, "batch_sampler", None) or sampler.sampler
    some = getattr(sampler, "replacement", False) or getattr(sampler, "_num_samples", None)
    return sampler, type(sampler).__name__ in ORDERS and not some


def planned_pieces(
    terms: Terms, rank: int, plan: RoundPlan, start: int, indices: Indices, filled: bool
) -> list[tuple[Indices, Piece]]:
    """This rank's planned pieces of a round whose samples begin at ``start`` of ``indices``, each with its samples.

    filled: an empty micro-step gets samples of the round that count for nothing. So it uses no parameter that the
    round's samples do not use, whose gradient would be 0 instead of None."""
    division = plan.division
    own = plan.loads if division is None else division.first + division.kept
    filler = indices[start : start + terms.min_samples] if filled else None
    start += sum(own[:rank].tolist())
    kept = 0 if division is None else int(division.kept[rank])
    mine = indices[start : start + int(own[rank])]
    if plan.deal is not None:
        lengths = plan.deal.lengths[plan.deal.starts[rank] :]
        return _in_cuts(plan, mine, plan.deal.sizes[rank].tolist(), filler, start, lengths)
    return pieces(terms, plan, mine, kept, filler, start)


def pieces(
    terms: Terms, plan: RoundPlan, mine: Indices, kept: int = 0, filler: Indices | None = None, at: int = 0
) -> list[tuple[Indices, Piece]]:
    """Cut this rank's samples of a round into micro-batches of at most ``terms.micro_batch`` samples, in multiples of
    ``terms.quantum``; into exactly ``terms.micro_steps(plan.loads)`` of them, unless that is None.

    A rank without samples still gets one micro-step, so that it joins the all-reduce: an empty one, or ``filler``
    samples that count for nothing if the model cannot take an empty batch.

    kept: samples of the last piece, before which a part of the round is claimed; 0 if all is run as planned. at: the
    position of the rank's first sample in the epoch's order.
    """
    at_once, micro_steps, unit = len(mine) - kept, terms.micro_steps(plan.loads), terms.quantum
    cuts = spread(at_once, micro_steps, terms.min_samples, unit) if micro_steps else _cuts(terms, at_once)
    if kept and terms.merge is not None:
        cuts += _cuts(terms, kept)
    elif kept:
        cuts.append(kept)
    return _in_cuts(plan, mine, cuts, filler, at, None)


def _cuts(terms: Terms, load: int) -> list[int]:
    """The micro-batches of a load; if each is a separate step (local steps), of about a step's size."""
    if not load:
        return []
    if terms.merge is None or terms.micro_batch is None:
        return cut(load, terms.micro_batch, terms.quantum)
    return _even(load, max(round(load / terms.micro_batch), 1), terms.quantum)


def _in_cuts(
    plan: RoundPlan, mine: Indices, cuts: list[int], filler: Indices | None, at: int, lengths: Array | None
) -> list[tuple[Indices, Piece]]:
    """A rank's samples in micro-batches of these sizes, at least one. lengths: those of ``mine``, perhaps more."""
    cuts, start, found = cuts or [0], 0, list[tuple[Indices, Piece]]()
    for number, size in enumerate(cuts):
        last = number == len(cuts) - 1
        chosen = mine[start : start + size] if size or filler is None else filler
        claims = plan.division is not None and number >= len(cuts) - 2
        parts = None
        if lengths is not None and plan.deal is not None:
            sizes = np.array([size] if size else [], np.int64)
            parts = batch_parts(lengths[start : start + size], sizes, plan.deal.model.padded)
        found.append((chosen, Piece(plan, size, number == 0, last, claims, parts, at + start)))
        start += size
    return found


def cut(load: int, most: int | None, unit: int = 1) -> list[int]:
    """Sizes of the fewest micro-batches of at most ``most`` samples, as even as possible (larger first) in multiples
    of ``unit``: a tiny last one would cost a whole overhead, and fail under batch norm."""
    if most is None or load <= most:
        return [load]
    return _even(load, -(-load // (most // unit * unit)), unit)


def spread(load: int, micro_steps: int, min_samples: int, unit: int = 1) -> list[int]:
    """Sizes of ``micro_steps`` micro-batches, as even as possible in multiples of ``unit``, each with at least
    ``min_samples`` or none; a load below that is one micro-batch."""
    count = min(micro_steps, max(load // max(min_samples, unit), 0 < load < min_samples))
    return (_even(load, count, unit) if count else []) + [0] * (micro_steps - count)


def _even(load: int, count: int, unit: int) -> list[int]:
    size, larger = divmod(load // unit, count)
    return [(size + 1) * unit] * larger + [size * unit] * (count - larger)
