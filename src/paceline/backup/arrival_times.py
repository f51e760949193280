"""How long k gradients take: DBW's eq. (17), and plain means for comparison.

The i-th gradient of a version is modelled to arrive after T_{h,i} seconds on average, if the version before had
waited for h gradients. T_{h,i} does not fall as i grows, does not rise as h grows, and T_{k,k} does not fall as k
grows, so that few samples say much about all of them.

The fit is the exact least-squares fit under this partial order. An upper set of the order is a staircase: column k
holds the cells h <= m_k, where m does not fall, and m_k >= k makes m_{k+1} >= k + 1. So the best cut of a block of
cells in two is found by dynamic programming over the columns in time proportional to the cells, and cutting every
block at its own mean until no cut gains anything is the optimum (Spouge, Wan and Wilbur 2003). All blocks of a
generation are cut in one pass: within a column they are consecutive runs, separated by offsets.
"""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from paceline.backup.protocol import Timings
from paceline.rounds import Array

Blocks = NDArray[np.int64]
TOLERANCE = 2e-14  # gains of a cut below this part of the weighted spread are rounding errors


class TimesState(NamedTuple):
    """The samples so far, first axis i (the place), second h."""

    total: Array  # sums of seconds, (n, n)
    samples: Array  # number of samples, (n, n)


def start(workers: int) -> TimesState:
    """The state without samples."""
    return TimesState(np.zeros((workers, workers)), np.zeros((workers, workers)))


def update(state: TimesState, timings: Timings, memory: float = 1.0) -> TimesState:
    """The state with these samples. memory: factor on the weight of the earlier ones; 1 keeps them forever."""
    total, samples = state.total * memory, state.samples * memory
    n = len(total)
    fits = (timings.place >= 1) & (timings.place <= n) & (timings.before >= 1) & (timings.before <= n)
    at = (timings.place[fits] - 1, timings.before[fits] - 1)
    np.add.at(total, at, timings.seconds[fits])
    np.add.at(samples, at, 1.0)
    return TimesState(total, samples)


def constrained(state: TimesState) -> Array:
    """Seconds for k = 1..n gradients if all updates wait for k, shape (n,): the optimum of eq. (17).

    For k without samples it is the least that the order allows (0 before the first sample), which is optimistic, so
    that these k are tried. DBW, eq. (17).
    """
    known = state.samples > 0
    means = np.divide(state.total, state.samples, out=np.zeros_like(state.total), where=known)
    return np.diagonal(lower_bounds(fit(means, state.samples), known)).copy()


def naive(state: TimesState) -> Array:
    """The plain means of the samples of T_{k,k}, shape (n,); NaN if there is none."""
    with np.errstate(invalid="ignore"):
        return np.diagonal(state.total) / np.diagonal(state.samples)


def fit(means: Array, weights: Array) -> Array:
    """The values closest to ``means`` in weighted least squares, shape (n, n); NaN in blocks without weight.

    means, weights: shape (n, n), first axis k, second h; weights are not negative, and means of cells without weight
        are ignored.
    """
    n, w = len(means), weights.ravel()
    y = np.where(w > 0, means.ravel(), 0.0)
    spread = float(w @ np.abs(y - np.average(y, weights=w))) if w.any() else 0.0
    blocks, active = np.zeros(n * n, np.int64), np.arange(n * n)
    while len(active):
        rank = _consecutive(blocks[active])
        weight = np.bincount(rank, w[active])
        mean = np.bincount(rank, (w * y)[active]) / np.where(weight > 0, weight, 1.0)
        above, gain = _cut(active, rank, w[active] * (y[active] - mean[rank]), n)
        parts = np.bincount(rank, above)
        divisible = (gain > TOLERANCE * spread) & (parts > 0) & (parts < np.bincount(rank))
        kept = divisible[rank]  # the others are not cut again
        active, lower = active[kept], ~above[kept]
        blocks = 2 * blocks
        blocks[active] += lower
        blocks = _consecutive(blocks)
    with np.errstate(invalid="ignore"):
        values = np.bincount(blocks, w * y) / np.bincount(blocks, w)
    return values[blocks].reshape(n, n)


def lower_bounds(values: Array, known: NDArray[np.bool_]) -> Array:
    """The least values, shape (n, n), that the order allows, given those of the known cells; at least 0."""
    low = np.where(known, values, 0.0)
    low = np.maximum.accumulate(np.maximum.accumulate(low, axis=0)[:, ::-1], axis=1)[:, ::-1]
    diagonal = np.maximum.accumulate(np.diagonal(low))
    # A cell (k, h) with h <= k lies above the diagonal's cells up to k.
    return np.where(np.tri(len(low), dtype=bool), np.maximum(low, diagonal[:, None]), low)


def _consecutive(numbers: Blocks) -> Blocks:
    """Numbers in the same order, counted from 0 without gaps."""
    return (np.cumsum(np.bincount(numbers) > 0) - 1)[numbers]


def _cut(cells: Blocks, rank: Blocks, gains: Array, n: int) -> tuple[NDArray[np.bool_], Array]:
    """The upper set of each block with the largest sum of gains: (which cells are in it, its sum for each block).

    cells: flat numbers k * n + h, counted from 0, rising; rank: the block of each, 0 the highest; gains: of each.
    """
    column, row = cells // n, cells % n
    head = np.flatnonzero(np.diff(rank + column * len(cells), prepend=-1))  # of a block's run in a column
    # A state is the number of cells of its column in a block's upper set: a run of c cells has c + 1 states.
    begin = head + np.arange(len(head))
    end = np.append(begin[1:], len(cells) + len(head)) - 1
    run = np.repeat(np.arange(len(head)), end - begin + 1)
    sums = np.cumsum(np.insert(gains, head, 0.0))
    sums -= sums[begin][run]
    height = np.insert(row + 1, head, row[head])  # m_k
    # The same block's run in the column before, and the highest allowed state there.
    key = rank[head] * (n + 1) + column[head] + 1
    order = np.argsort(key)
    found = order[np.searchsorted(key[order], key - 1)]
    before = np.where(key[found] == key - 1, found, -1)
    at = column[head][run]
    most = np.where(height > at, height, np.minimum(height, at - 1)) - row[head][before[run]]
    nothing = len(run) + rank[head]  # the states of blocks without a run before
    lowest = np.minimum(begin[before][run] + most, end[before][run])
    source = np.where((before >= 0)[run], lowest, nothing[run])
    # Offsets make every value of a block larger than every one of the block above it.
    bound = np.bincount(rank, np.abs(gains))
    bound += 1e-9 * bound.max() + 1e-300
    offset = 2.0 * np.cumsum(bound) - bound
    best = np.append(np.empty(len(run)), offset)
    edges = np.flatnonzero(np.diff(column[head], prepend=-1))  # the first run of each column
    columns = list(pairwise(np.append(begin[edges], len(run)).tolist()))
    for a, b in columns:
        np.maximum.accumulate(sums[a:b] + best[source[a:b]], out=best[a:b])

    limit, chosen = np.append(end, 0), begin.copy()  # the last state allowed; the first that is as good
    runs = list(pairwise([*edges.tolist(), len(head)]))
    for (a, b), (c, d) in zip(columns[::-1], runs[::-1], strict=True):
        chosen[c:d] = a + best[a:b].searchsorted(best[limit[c:d]])
        limit[before[c:d]] = source[chosen[c:d]]  # without a run before, an entry that is never read
    above: NDArray[np.bool_] = row < np.repeat(height[chosen], end - begin)
    last = np.isin(np.arange(len(head)), before, invert=True)
    gain = np.bincount(rank[head][last], (best[end] - offset[rank[head]])[last], len(offset))
    return above, gain.astype(np.float64)
