"""How long k gradients take: DBW's eq. (17), and two other ways to answer.

The i-th gradient of a version, when the version before had waited for h, is taken to arrive after T_{h,i}
seconds in the mean. T_{h,i} does not fall as i grows, does not rise as h grows, and T_{k,k} does not fall as k
grows: so few samples say much about all of them.

The fit is that of least squares under this partial order, exactly. An upper set of the order is a staircase: column k
holds the cells h <= m_k, where m does not fall, and m_k >= k makes m_{k+1} >= k + 1. So the best cut of a block of
cells in two is found by dynamic programming over the columns in time proportional to the cells, and cutting every
block at its own mean until no cut gains anything is the optimum (Spouge, Wan and Wilbur 2003). All blocks of a
generation are cut in one pass: within a column they are consecutive runs, kept apart by offsets.
"""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from paceline.backup.protocol import Timings
from paceline.rounds import Array

Blocks = NDArray[np.int64]
TOLERANCE = 2e-14  # of the weighted spread: gains of a cut below it are rounding
WARM_TRIES = 25


class TimesState(NamedTuple):
    """Samples so far, first axis i (the place), second h; and the blocks of the last fit."""

    total: Array  # seconds, (n, n)
    samples: Array  # how many, (n, n)
    blocks: NDArray[np.int64]  # (n, n)


def start(workers: int) -> TimesState:
    """No sample yet."""
    nothing = np.zeros((workers, workers))
    return TimesState(nothing, nothing, np.zeros((workers, workers), np.int64))


def update(state: TimesState, timings: Timings, memory: float = 1.0) -> TimesState:
    """Add samples. memory: what the earlier ones count for from now on; 1 keeps them for good."""
    total, samples = state.total * memory, state.samples * memory
    n = len(total)
    fits = (timings.place >= 1) & (timings.place <= n) & (timings.before >= 1) & (timings.before <= n)
    at = (timings.place[fits] - 1, timings.before[fits] - 1)
    np.add.at(total, at, timings.seconds[fits])
    np.add.at(samples, at, 1.0)
    return state._replace(total=total, samples=samples)


def constrained(state: TimesState) -> tuple[Array, TimesState]:
    """Seconds for k = 1..n gradients if one always waits for k, shape (n,): the optimum of eq. (17).

    Where no sample says anything, the least that the order allows (0 before the first sample): optimistic, so
    that such k are tried. DBW, eq. (17).
    """
    known = state.samples > 0
    if not known.any():
        return np.zeros(len(state.samples)), state
    means = np.divide(state.total, state.samples, out=np.zeros_like(state.total), where=known)
    start_from = state.blocks if state.blocks.any() else None
    values, blocks = fit(means, state.samples, start_from)
    return np.diagonal(lower_bounds(values, known)).copy(), state._replace(blocks=blocks)


def naive(state: TimesState) -> Array:
    """The plain means of the samples of T_{k,k}, shape (n,); NaN where there is none."""
    with np.errstate(invalid="ignore"):
        return np.diagonal(state.total) / np.diagonal(state.samples)


class Ordered(NamedTuple):
    """values, shape (n, n), NaN in blocks without weight; blocks: which cells share a value, 0 the highest."""

    values: Array
    blocks: Blocks


def fit(means: Array, weights: Array, start: Blocks | None = None) -> Ordered:
    """The values closest to ``means`` in the weighted squares.

    means, weights: shape (n, n), first axis k, second h; weights not negative, means of cells without weight
        count for nothing.
    start: the blocks of an earlier, similar problem; the answer is the same, found sooner.
    """
    y = np.where(weights > 0, means, 0.0).ravel()
    w = weights.ravel()
    n = len(means)
    spread = float(np.dot(w, np.abs(y - np.average(y, weights=w) if w.any() else y)))
    tolerance = TOLERANCE * spread
    everything = np.arange(n * n)
    if start is not None:
        blocks, active = start.ravel(), everything
        for _ in range(WARM_TRIES):
            blocks, joined = _ordered(blocks, y, w)
            if len(active) < len(everything):  # the others are known to be indivisible
                active = np.flatnonzero(joined[blocks])
            blocks = _divide(blocks, active, y, w, n, tolerance)
            value = _values(blocks, y, w)
            value = value[~np.isnan(value)]
            if np.all(value[1:] <= value[:-1]):
                return _result(blocks, y, w, n)
            active = active[:0]
    return _result(_divide(np.zeros(n * n, np.int64), everything, y, w, n, tolerance), y, w, n)


def lower_bounds(values: Array, known: NDArray[np.bool_]) -> Array:
    """The least values, shape (n, n), that the order allows where the known cells have theirs; at least 0."""
    low = np.where(known, values, 0.0)
    low = np.maximum.accumulate(np.maximum.accumulate(low, axis=0)[:, ::-1], axis=1)[:, ::-1]
    diagonal = np.maximum.accumulate(np.diagonal(low))
    # A cell (k, h) with h <= k lies above the diagonal's cells up to k.
    return np.where(np.tri(len(low), dtype=bool), np.maximum(low, diagonal[:, None]), low)


def _values(blocks: Blocks, y: Array, w: Array) -> Array:
    weight = np.bincount(blocks, w)
    with np.errstate(invalid="ignore"):
        return np.bincount(blocks, w * y) / weight


def _result(blocks: Blocks, y: Array, w: Array, n: int) -> Ordered:
    return Ordered(_values(blocks, y, w)[blocks].reshape(n, n), blocks.reshape(n, n))


def _ordered(blocks: Blocks, y: Array, w: Array) -> tuple[Blocks, NDArray[np.bool_]]:
    """Neighbouring blocks joined until their values fall from each to the next; which blocks were joined."""
    weight, total = np.bincount(blocks, w), np.bincount(blocks, w * y)
    stack: list[list[float]] = []  # [first block, weight, total]
    for b, (here, t) in enumerate(zip(weight.tolist(), total.tolist(), strict=True)):
        stack.append([b, here, t])
        while len(stack) > 1:
            below, above = stack[-1], stack[-2]
            if below[1] > 0 and above[1] > 0 and above[2] * below[1] > below[2] * above[1]:
                break
            above[1] += below[1]
            above[2] += below[2]
            stack.pop()
    heads = np.array([int(entry[0]) for entry in stack])
    joined = np.diff(heads, append=len(weight)) > 1
    number = np.zeros(len(weight), np.int64)
    number[heads[1:]] = 1
    return np.cumsum(number)[blocks], joined


def _divide(blocks: Blocks, active: Blocks, y: Array, w: Array, n: int, tolerance: float) -> Blocks:
    """The blocks of the active cells cut, and their parts again, as long as a cut gains."""
    while len(active):
        rank = _consecutive(blocks[active])
        weight = np.bincount(rank, w[active])
        mean = np.bincount(rank, (w * y)[active]) / np.where(weight > 0, weight, 1.0)
        gains = w[active] * (y[active] - mean[rank])
        above, gain = _cut(active, rank, gains, n)
        parts = np.bincount(rank, above)
        divisible = (gain > tolerance) & (parts > 0) & (parts < np.bincount(rank))
        if not divisible.any():
            break
        kept = divisible[rank]
        active, lower = active[kept], ~above[kept]
        finer = 2 * blocks
        finer[active] += lower
        blocks = _consecutive(finer)
    return blocks


def _consecutive(numbers: Blocks) -> Blocks:
    """The same order, counted from 0 without gaps."""
    return (np.cumsum(np.bincount(numbers) > 0) - 1)[numbers]


def _cut(cells: Blocks, rank: Blocks, gains: Array, n: int) -> tuple[NDArray[np.bool_], Array]:
    """The upper set of each block with the largest sum of gains: (which cells are in it, its sum a block).

    cells: flat numbers k * n + h, counted from 0, rising; rank: the block of each, 0 the highest; gains: each
    cell's.
    """
    column, row = cells // n, cells % n
    count = len(cells)
    first = np.empty(count, bool)  # of its block in its column
    first[0] = True
    first[1:] = (rank[1:] != rank[:-1]) | (column[1:] != column[:-1])
    run = np.cumsum(first) - 1
    head = np.flatnonzero(first)
    length = np.diff(np.append(head, count))
    run_rank, run_column, low = rank[head], column[head], row[head]
    runs = len(head)

    # A run of c cells has c + 1 states: how many of its cells are above the cut.
    begin = head + np.arange(runs)
    end = begin + length
    sums = np.empty(count + runs)
    sums[begin] = 0.0
    total = np.cumsum(gains)
    sums[np.arange(count) + run + 1] = total - np.repeat(total[head] - gains[head], length)
    state_run = np.repeat(np.arange(runs), length + 1)
    height = np.arange(count + runs) - begin[state_run] + low[state_run]  # m_k

    # The same block's run in the column before, and the state there up to which one may choose.
    order = np.lexsort((run_column, run_rank))
    follows = np.zeros(runs, bool)
    follows[1:] = (run_rank[order][1:] == run_rank[order][:-1]) & (np.diff(run_column[order]) == 1)
    before = np.full(runs, -1)
    before[order[follows]] = order[np.flatnonzero(follows) - 1]
    after = np.full(runs, -1)
    after[order[np.flatnonzero(follows) - 1]] = order[follows]
    cap = np.where(height > run_column[state_run], height, np.minimum(height, run_column[state_run] - 1))
    previous = before[state_run]
    source = np.where(
        previous >= 0,
        begin[previous] + np.minimum(cap - low[previous], length[previous]),
        count + runs + run_rank[state_run],
    )

    # Offsets make every value of a block larger than every one of the block above it.
    bound = np.bincount(rank, np.abs(gains))
    bound += 1e-9 * bound.max() + 1e-300
    offset = 2.0 * np.cumsum(bound) - bound
    best = np.empty(count + runs + len(offset))
    best[count + runs :] = offset
    edges = np.flatnonzero(np.diff(run_column, prepend=-1))
    state_edges = np.append(begin[edges], count + runs).tolist()
    accumulate, take, add = np.maximum.accumulate, best.take, np.add
    for a, b in pairwise(state_edges):
        accumulate(add(sums[a:b], take(source[a:b])), out=best[a:b])

    chosen: Blocks = np.zeros(runs, np.int64)  # the first state that attains the best
    run_edges = np.append(edges, runs).tolist()
    final = after < 0
    for column_number in range(len(edges) - 1, -1, -1):
        a, b = run_edges[column_number], run_edges[column_number + 1]
        s, e = state_edges[column_number], state_edges[column_number + 1]
        wanted = np.where(final[a:b], end[a:b], source[chosen[after[a:b]]])
        chosen[a:b] = s + best[s:e].searchsorted(best[wanted])
    taken = chosen - begin
    above: NDArray[np.bool_] = np.arange(count) - head[run] < taken[run]
    ends = np.flatnonzero(final)
    gain = np.bincount(run_rank[ends], best[end[ends]] - offset[run_rank[ends]], len(offset))
    return above, gain.astype(np.float64)
