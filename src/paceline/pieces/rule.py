"""The rule of rounds in pieces: what each worker runs at once, and how much whoever is free claims next.

Every engine goes by it: the torch engine's ranks, each for itself; the Ray engine's server; the virtual clock, all
realizations at once. Arrays broadcast; the last axis of loads is the worker.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from paceline.rounds import Array, PiecePlan

LARGEST = 2.0**62  # samples of a piece
Counts = NDArray[np.int64]


def divide(
    piece_plan: PiecePlan, loads: Counts, unit: int = 1, most: int | Counts | None = None
) -> tuple[Counts, Counts]:
    """(what each worker runs at once, what it keeps for its end), whole samples of shape (..., n).

    What is left of the loads is the pool that is claimed; it holds a multiple of ``unit`` samples of each load,
    so that pieces do too. The kept end makes every worker's last piece known as its last before it begins:
    gradients are reduced in that one. most: samples of a piece at most, for all or for each, (n,).
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


def divide_grid(piece_plan: PiecePlan, loads: Counts, cell: int) -> tuple[Counts, Counts]:
    """As ``divide``, but on a grid that no plan moves: whole cells of ``cell`` samples, and what is left of the
    loads, the round's last and perhaps short cell among it, in the pool."""
    cells = loads // cell
    kept = np.minimum(cells, 1)
    first = np.clip(np.floor(piece_plan.at_once[..., None] * cells).astype(np.int64), 0, cells - kept)
    return first * cell, kept * cell


def claim_of_one(
    piece_plan: PiecePlan,
    worker: int,
    *,
    told: bool,
    left: float,
    batch: float,
    held: float,
    speed: float,
    together: float,
    workers: int,
    most: int,
    unit: int = 1,
) -> int:
    """``claim`` for one worker of one run, in plain numbers: the same samples in a tenth of the time."""
    part = piece_plan.claim_after_known if told else piece_plan.claim_before_known
    expected = float(piece_plan.speeds[worker])
    weight = min(speed / together, 1.0) if together > 0 else 1.0 / workers
    slower = min(speed / expected, 1.0) if expected > 0 else 1.0
    least = max(1.0, float(piece_plan.least[worker]) * slower)
    remains, due, portion = left * weight, batch * weight - held, float(part)
    known = max(portion * (max(due, remains) if portion < 1 else remains), least)
    samples = min(known, LARGEST) if math.isfinite(known) else LARGEST
    return int(min(math.ceil(math.ceil(samples) / unit) * unit, left, most))


def claim(
    piece_plan: PiecePlan,
    worker: int | tuple[Counts, ...],
    *,
    told: NDArray[np.bool_] | bool,
    left: Array | float,
    batch: Array | float,
    held: Array | float,
    speed: Array | float,
    together: Array | float,
    workers: int,
    most: float = np.inf,
    unit: int = 1,
) -> Counts:
    """Samples of the worker's next piece, at least one ``unit`` where as much is left; of the shape of ``left``.

    As ``portion``, in samples. most: samples of a piece at most, a multiple of ``unit``.
    """
    known = portion(
        piece_plan,
        worker,
        told=told,
        left=left,
        batch=batch,
        held=held,
        speed=speed,
        together=together,
        workers=workers,
    )
    samples = np.minimum(_up(np.ceil(known), unit), np.asarray(left, float))
    return np.minimum(samples, most).astype(np.int64)


def portion(
    piece_plan: PiecePlan,
    worker: int | tuple[Counts, ...],
    *,
    told: NDArray[np.bool_] | bool,
    left: Array | float,
    batch: Array | float,
    held: Array | float,
    speed: Array | float,
    together: Array | float,
    workers: int,
) -> Array:
    """How much the worker's next piece should hold, perhaps more than is left; of the shape of ``left``.

    All are samples, or all are costs, of which 1 is that of a mean sample. worker: its place, or the index of one
    place in each realization. told: whether every worker has told its speed in this round. left: in the pool now.
    batch: of the round. held: what the worker has run, runs, or keeps for its end. speed: of the worker in this
    round, a second, as far as is known; together: of all workers; 0 where nothing is known, and the pool is shared
    evenly among ``workers``.
    """
    left, speed, together = np.asarray(left, float), np.asarray(speed, float), np.asarray(together, float)
    known = together > 0
    weight = np.where(known, np.minimum(speed / np.where(known, together, 1.0), 1.0), 1.0 / workers)
    expected = piece_plan.speeds[worker]
    # What the smallest piece holds follows the speed of the moment, as its seconds are what counts.
    slower = np.where(expected > 0, np.minimum(speed / np.where(expected > 0, expected, 1.0), 1.0), 1.0)
    least = np.maximum(1.0, np.broadcast_to(piece_plan.least, piece_plan.speeds.shape)[worker] * slower)
    part = np.where(told, piece_plan.claim_after_known, piece_plan.claim_before_known)
    return _portion(part, left, batch * weight - held, weight, least)


def size(part: Array, left: Array, due: Array, weight: Array, least: Array, unit: int = 1) -> Counts:
    """Samples of the next piece; all of one shape.

    part: what is claimed of what is due (``PiecePlan.claim_...``). least: as in PiecePlan. left: samples in the pool
    now. due: samples that the worker would still have to claim if all were to end together, by the speeds known
    now. weight: the worker's part of all speeds.
    """
    samples = _up(np.ceil(_portion(part, left, due, weight, least)), unit)
    return np.minimum(samples, left).astype(np.int64)


def _portion(part: Array, left: Array, due: Array, weight: Array, least: Array) -> Array:
    """As ``size``, unrounded, and perhaps more than is left.

    What is due to the workers are shares of what is left, so who claims a half each time runs stage after stage of
    factoring without any counting. Where speeds have fallen, nothing may seem to be due while much is left: then
    the worker's part of that is.
    """
    remains = left * weight
    wanted = part * np.where(part < 1, np.maximum(due, remains), remains)
    return np.maximum(wanted, least)


def _up(samples: Array, unit: int) -> Counts:
    # A piece larger than any batch is as good as the batch; beyond 2**63 it would turn negative.
    return np.minimum(np.ceil(samples / unit) * unit, LARGEST).astype(np.int64)
