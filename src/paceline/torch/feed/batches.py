"""Which samples make up a round, and which of them are this rank's: the same on every rank, whatever the split.

Round k of an epoch uses the next B entries of the epoch's permutation; rank r takes its slice of them, cut by
the running sum of the loads. So every sample is used exactly once an epoch, every rank takes the same number
of rounds, and what must be kept to go on (epoch, samples done) does not depend on the number of ranks.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from paceline.torch.claiming.division import Division

from paceline.rounds import Indices


class Piece(NamedTuple):
    """A micro-batch of this rank: one turn of the user's loop."""

    step: int  # the round it belongs to, counted over the whole run
    samples: int  # samples that count; fewer than the indices where some only keep batch norm fed
    loads: Indices  # every rank's samples in the round, shape (n,)
    batch: int  # samples of the round over all ranks
    first: bool
    last: bool
    division: Division | None = None  # what to claim after this piece; before it, where it is the last


@dataclass(frozen=True, slots=True)
class Order:
    """The order of the samples in each epoch: a permutation drawn from (seed, epoch), or as they stand."""

    samples: int
    seed: int = 0
    shuffle: bool = True

    def epoch(self, epoch: int) -> Indices:
        """Sample indices in the order of use, int64, shape (samples,)."""
        if not self.shuffle:
            return np.arange(self.samples)
        return np.random.default_rng((self.seed, epoch)).permutation(self.samples)


def batches(samples: int, done: int, batch: int, floor: int = 1) -> Iterator[tuple[int, int]]:
    """(first, size) of each remaining round of an epoch. Only the last may be short; fewer samples than ``floor``
    cannot be a round of their own (batch norm needs 2) and join the one before."""
    first = done
    while first < samples:
        left = samples - first
        size = left if left - batch < floor else batch
        yield first, size
        first += size


def pieces(
    mine: Indices,
    step: int,
    loads: Indices,
    most: int | None,
    filler: Indices | None = None,
    division: Division | None = None,
    kept: int = 0,
    turns: int | None = None,
    floor: int = 1,
    unit: int = 1,
) -> Iterator[tuple[Indices, Piece]]:
    """Cut this rank's samples of a round into micro-batches of at most ``most`` samples, in multiples of ``unit``.

    A rank with nothing to do still gets one turn, so that it joins the all-reduce: an empty one, or
    ``filler`` samples that count for nothing where the model cannot take an empty batch.

    division: where a part of the round is claimed while it runs; then the last piece is what is ``kept`` for it.
    turns: exactly so many pieces, each with at least ``floor`` samples or none.
    """
    batch = int(loads.sum())
    at_once = len(mine) - kept
    cuts = spread(at_once, turns, floor, unit) if turns else cut(at_once, most, unit) if at_once else []
    if kept or not cuts:
        cuts.append(kept)
    start = 0
    for number, size in enumerate(cuts):
        last = number == len(cuts) - 1
        chosen = mine[start : start + size] if size or filler is None else filler
        at_claims = number >= len(cuts) - 2
        yield chosen, Piece(step, size, loads, batch, number == 0, last, division if at_claims else None)
        start += size


def cut(load: int, most: int | None, unit: int = 1) -> list[int]:
    """Sizes of the fewest micro-batches of at most ``most`` samples, as even as they can be (larger first) in
    multiples of ``unit``: a tiny last one would cost a whole overhead, and fail under batch norm."""
    if most is None or load <= most:
        return [load]
    return _even(load, -(-load // (most // unit * unit)), unit)


def spread(load: int, turns: int, floor: int = 1, unit: int = 1) -> list[int]:
    """Sizes of ``turns`` micro-batches, as even as they can be in multiples of ``unit``, with at least ``floor``
    samples or none in each."""
    count = min(turns, load // max(floor, unit))
    return (_even(load, count, unit) if count else []) + [0] * (turns - count)


def _even(load: int, count: int, unit: int) -> list[int]:
    size, larger = divmod(load // unit, count)
    return [(size + 1) * unit] * larger + [size * unit] * (count - larger)
