"""A round in pieces on the virtual clock: the worker that is free first claims next, in all realizations at once.

The claims follow each other in time, so the loop is over claims: about n times the pieces of a worker, for any
number of realizations.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from paceline.errors import PacelineError
from paceline.pieces import rule
from paceline.pieces.rule import Counts
from paceline.rounds import Array, PiecePlan

CLAIM_SECONDS = 2e-4  # two round trips to a store, as measured between processes of one machine
CLAIMS = 20_000  # most claims of a round: they are played one after another, so a million would take minutes


class PlayedRound(NamedTuple):
    """The outcome of a round in pieces; all of shape (R, n).

    loads: samples run. seconds: until each worker was done, its overhead included. pieces: number that each ran.
    idle: seconds with nothing left to claim before a lost worker's samples could be claimed; included in seconds.
    expected: seconds that its claims would have taken at the pace of its first piece; strayed: the absolute
    difference from that; pace: seconds per sample after its first piece, NaN if it ran nothing then.
    """

    loads: Counts
    seconds: Array
    pieces: Counts
    idle: Array
    expected: Array
    strayed: Array
    pace: Array


def play(
    piece_plan: PiecePlan,
    loads: Counts,
    slope: Array,
    overhead: Array,
    piece_seconds: Array | float,
    knee: Array | float = 0.0,
    present: NDArray[np.bool_] | None = None,
    most: int = 2**62,
    unit: int = 1,
    rng: np.random.Generator | None = None,
    unsteady: float = 0.0,
    missed: float = 0.0,
) -> PlayedRound:
    """Run planned ``loads``, shape (R, n), in pieces.

    slope: seconds per sample in this round. overhead: seconds of the round that do not grow with its load.
    piece_seconds: what each piece costs beyond its samples. knee: samples below which a piece takes no less time.
    present: the workers that claim. What the others should have run first or last can be claimed ``missed`` seconds
    after the round began. most: most samples of a piece.
    unsteady: sd of the logarithm of each piece's own pace.

    Raises PacelineError if a round would need more than ``CLAIMS`` claims plus 20 per worker.
    """
    shape = loads.shape
    present = np.ones(shape, bool) if present is None else present
    first, kept = rule.divide(piece_plan, loads, unit, most)
    pool = (loads - first - kept).sum(-1).astype(float)
    orphaned = np.where(present, 0, first + kept).sum(-1).astype(float)
    first, kept = np.where(present, first, 0), np.where(present, kept, 0)
    cost, knees = np.broadcast_to(piece_seconds, shape), np.broadcast_to(knee, shape)

    def seconds(samples: Counts, of: Array, per_piece: Array, least: Array) -> Array:
        pace = of if not unsteady or rng is None else of * np.exp(unsteady * rng.standard_normal(of.shape))
        return np.where(samples > 0, per_piece + pace * np.maximum(samples, least), 0.0)

    running = seconds(first, slope, cost, knees)
    pace = np.where(first > 0, (running - cost) / np.maximum(first, 1), 0.0)
    done, pieces = first.astype(float), -(-first // most)  # a load beyond the memory is run in several
    free = np.where(present, overhead + (running + np.maximum(pieces - 1, 0) * cost), np.inf)
    expected, reported = np.where(present, piece_plan.speeds, 0.0), ~present
    known = expected.sum(-1) > 0
    claimed, took_claims = np.zeros(shape), np.zeros(shape)

    def claim(pool: Array, batch: Array, measuring: bool) -> None:
        left, number = pool.copy(), 0
        while left.any():
            number += 1
            if number > CLAIMS + 20 * shape[-1]:
                raise PacelineError(
                    f"a round of {loads.sum(-1).max():,} samples would have more than {number - 1:,} pieces; choose "
                    "larger pieces, or a policy that plans whole rounds"
                )
            at = np.arange(shape[0]), np.argmin(free, axis=-1)
            busy = free[at] - overhead[at] - pieces[at] * cost[at]
            measured = (done[at] > 0) & (busy > 0) & (left > 0) & known & measuring
            expected[at] = np.where(measured, done[at] / np.where(measured, busy, 1.0), expected[at])
            reported[at] |= measured
            samples = rule.claim(
                piece_plan,
                at,
                reported=np.asarray(reported.all(-1)),
                left=left,
                batch=batch,
                held=done[at] + kept[at],
                speed=expected[at],
                together=expected.sum(-1),
                workers=shape[-1],
                most=most,
                unit=unit,
            )
            ran = seconds(samples, slope[at], cost[at], knees[at])
            claimed[at] += samples
            took_claims[at] += ran - np.where(samples > 0, cost[at], 0.0)
            free[at] += np.where(samples > 0, CLAIM_SECONDS + ran, 0.0)
            done[at] += samples
            pieces[at] += samples > 0
            left -= samples

    claim(pool, loads.sum(-1) - orphaned, True)
    last = seconds(kept, slope, cost, knees)
    free = free + last
    done, pieces = done + kept, pieces + (kept > 0)
    idle = np.where(present & (orphaned > 0)[:, None], np.maximum(missed - free, 0.0), 0.0)
    free = free + idle
    # The worker's time now includes a wait, so its speed is no longer measured from it.
    claim(orphaned, loads.sum(-1), False)
    expected_seconds = pace * claimed
    strayed = np.where(pace > 0, np.abs(took_claims - expected_seconds), 0.0)
    behind = np.where(claimed > 0, claimed, kept)
    took = np.where(claimed > 0, took_claims, last - cost)
    pace_behind = np.divide(took, behind, out=np.full(shape, np.nan), where=behind > 0)
    return PlayedRound(done.astype(np.int64), free, pieces, idle, expected_seconds, strayed, pace_behind)
