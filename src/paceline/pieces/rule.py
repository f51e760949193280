"""The rule of rounds in pieces: what each worker runs at once, and how much a free worker claims next.

Every engine uses it: the torch engine's ranks, each for itself; the Ray engine's server; the virtual clock, for all
realizations at once. Arrays broadcast; the last axis of loads is the worker. The estimates that follow from the
pieces' seconds after a round are here, too.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.rounds import Array, PiecePlan

LARGEST = 2.0**62  # samples of a piece
Counts = NDArray[np.int64]
COST_STEP = 1.1  # factor by which a piece's cost follows each round's measurement: a running median


def divide(
    piece_plan: PiecePlan, loads: Counts, unit: int = 1, most: int | Counts | None = None
) -> tuple[Counts, Counts]:
    """(samples that each worker runs at once, samples that it keeps for its end), whole, of shape (..., n).

    The rest of the loads is the pool that is claimed; it holds a multiple of ``unit`` samples of each load,
    so that pieces do too. Because of the kept end a worker knows before its last piece that it is the last, in
    which gradients are reduced. most: samples of a piece at most, for all or for each, (n,).
    """
    kept = _up(np.ceil(piece_plan.least), unit)
    if most is not None:
        kept = np.minimum(kept, most // unit * unit)
    kept = np.minimum(kept, loads)
    first = np.floor(piece_plan.at_once[..., None] * loads).astype(np.int64) // unit * unit
    first = np.minimum(first, (loads - kept) // unit * unit)
    kept = kept + (loads - kept - first) % unit
    whole = (piece_plan.at_once >= 1)[..., None]
    return np.where(whole, loads, first), np.where(whole, 0, kept)


def divide_chunks(piece_plan: PiecePlan, loads: Counts, chunk: int) -> tuple[Counts, Counts]:
    """Like ``divide``, but in fixed chunks: whole ones of ``chunk`` samples at once and at the end; the rest of the
    loads, with the round's last and perhaps short chunk, is the pool."""
    chunks = loads // chunk
    kept = np.minimum(chunks, 1)
    first = np.clip(np.floor(piece_plan.at_once[..., None] * chunks).astype(np.int64), 0, chunks - kept)
    return first * chunk, kept * chunk


def claim(
    piece_plan: PiecePlan,
    worker: int | tuple[Counts, ...],
    *,
    most: float = math.inf,
    unit: int = 1,
    **known: Any,
) -> Any:
    """Samples of the worker's next piece, at least one ``unit`` if enough are left; an int, or an array of the shape
    of ``left``.

    known: as for ``portion``, in samples. most: samples of a piece at most, a multiple of ``unit``.
    """
    wanted, left = portion(piece_plan, worker, **known), known["left"]
    if isinstance(worker, int):
        return int(min(math.ceil(math.ceil(min(wanted, LARGEST)) / unit) * unit, left, most))
    return np.minimum(np.minimum(_up(np.ceil(wanted), unit), left), most).astype(np.int64)


def portion(
    piece_plan: PiecePlan,
    worker: int | tuple[Counts, ...],
    *,
    reported: NDArray[np.bool_] | bool,
    left: Array | float,
    batch: Array | float,
    held: Array | float,
    speed: Array | float,
    together: Array | float,
    workers: int,
) -> Any:
    """The size that the worker's next piece should have, perhaps more than is left; of the shape of ``left``.

    All are samples, or all are costs, of which 1 is that of a mean sample. worker: its place, and all others are
    numbers; or the index of one place in each realization, and all others are arrays. reported: whether every worker
    has reported its speed in this round. left: in the pool now. batch: of the round. held: what the worker has run,
    runs, or keeps for its end. speed: of the worker in this round, a second, as far as is known; together: of all
    workers; 0 if nothing is known, and the pool is shared evenly among ``workers``.

    What is due to the workers are shares of what is left, so who claims a half each time runs stage after stage of
    factoring without any counting. Where speeds have fallen, nothing may seem to be due while much is left: then
    the worker's part of that is.
    """
    larger: Any
    smaller: Any
    where: Any
    if isinstance(worker, int):  # a rank claims while others wait for it: numpy would take ten times as long
        larger, smaller, where = max, min, lambda condition, yes, no: yes if condition else no
    else:
        larger, smaller, where = np.maximum, np.minimum, np.where
    planned = together > 0
    weight = where(planned, smaller(speed / where(planned, together, 1.0), 1.0), 1.0 / workers)
    expected = piece_plan.speeds[worker]
    # What the smallest piece holds follows the speed of the moment, as its seconds are what counts.
    slower = where(expected > 0, smaller(speed / where(expected > 0, expected, 1.0), 1.0), 1.0)
    least = larger(piece_plan.least[worker] * slower, 1.0)
    part = where(reported, piece_plan.claim_after_known, piece_plan.claim_before_known)
    remains = left * weight
    return larger(part * where(part < 1, larger(batch * weight - held, remains), remains), least)


def _up(samples: Array, unit: int) -> Counts:
    # A cut piece is still larger than any batch; from 2**63 on, the conversion to int64 would turn it negative.
    return np.minimum(np.ceil(samples / unit) * unit, LARGEST).astype(np.int64)


def piece_cost(sizes: Sequence[float], seconds: Sequence[float], before: float) -> float:
    """The estimated seconds of a piece beyond its samples after a round, from its largest and its smallest piece.

    before: the estimate before the round; as a round's measurement is noisy, the result is only a step towards it.
    """
    if len(sizes) < 2:
        return before
    large, small = int(np.argmax(sizes)), int(np.argmin(sizes))
    if sizes[large] < 2 * sizes[small]:
        return before
    found = (seconds[small] * sizes[large] - seconds[large] * sizes[small]) / (sizes[large] - sizes[small])
    return float(np.clip(before * COST_STEP if found > before else before / COST_STEP, 5e-5, 1.0))


def against_the_first(
    sizes: Sequence[float], seconds: Sequence[float], cost: float
) -> tuple[float, float, float]:
    """(seconds that a worker's claims would have taken at the pace of its first piece, the deviation of the real
    seconds from these, the pace of the pieces after the first).

    The last piece may have waited for others: it is left out, except from the pace if the worker claimed nothing.
    """
    if len(sizes) < 2:
        return 0.0, 0.0, math.nan
    last = max(len(sizes) - 1, 2)
    behind, took = sum(sizes[1:last]), sum(seconds[1:last]) - cost * (last - 1)
    pace = max(took, 0.0) / behind if behind else math.nan  # a worker without load ends with an empty piece
    if len(sizes) < 3:
        return 0.0, 0.0, pace
    expected = max(seconds[0] - cost, 0.0) / sizes[0] * behind
    return expected, abs(took - expected) if expected else 0.0, pace
