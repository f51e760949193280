"""A round in pieces on the virtual clock: who is free first claims next, all realizations at once.

The claims follow each other in time, so the loop is over claims: about n times the pieces of a worker, whatever
the number of realizations.
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
CLAIMS = 20_000  # of a round, at most: they follow each other in time, so a million would take minutes
AHEAD = 0.1  # of a piece that is left to run when the next one is claimed: this hides the time of the claim


class PlayedRound(NamedTuple):
    """The outcome of a round in pieces; all of shape (R, n).

    loads: samples run. seconds: until each was done, its overhead included. pieces: how many each ran. idle:
    seconds before each knew that somebody was missed, with nothing left to claim; they are in its seconds.
    expected: seconds that its claims would have taken at the pace of its first piece; strayed: how far from it.
    """

    loads: Counts
    seconds: Array
    pieces: Counts
    idle: Array
    expected: Array
    strayed: Array


def play(
    piece_plan: PiecePlan,
    loads: Counts,
    slope: Array,
    overhead: Array,
    piece_seconds: Array | float,
    knee: Array | float = 0.0,
    present: NDArray[np.bool_] | None = None,
    most: int | None = None,
    unit: int = 1,
    ahead: float = AHEAD,
    rng: np.random.Generator | None = None,
    unsteady: float = 0.0,
    missed: float = 0.0,
) -> PlayedRound:
    """Run planned ``loads``, shape (R, n), in pieces.

    slope: seconds per sample in this round. overhead: seconds of the round that do not grow with its load.
    piece_seconds: what each piece costs beyond its samples. knee: samples below which a piece takes no less.
    present: who claims. What the others were to run at once or last of all is claimed in its turn, ``missed``
    seconds after the round began. most: samples of a piece at most. ahead: portion of a piece that is left to
    run when the next one is claimed, which hides the claim.
    unsteady: sd of the logarithm of each piece's own pace.

    Raises PacelineError where the pieces are so small that a round would need more than ``CLAIMS``, and 20 a worker.
    """
    shape = loads.shape
    first, kept = rule.divide(piece_plan, loads, unit, most)
    pool = (loads - first - kept).sum(-1).astype(float)
    orphaned = np.zeros_like(pool)
    if present is not None:
        orphaned = np.where(present, 0, first + kept).sum(-1).astype(float)
        first, kept = np.where(present, first, 0), np.where(present, kept, 0)
    rows = np.arange(shape[0])
    cost, knees = np.broadcast_to(piece_seconds, shape), np.broadcast_to(knee, shape)

    def seconds(samples: Counts, of: Array, per_piece: Array, least: Array) -> Array:
        pace = of if not unsteady or rng is None else of * np.exp(unsteady * rng.standard_normal(of.shape))
        return np.where(samples > 0, per_piece + pace * np.maximum(samples, least), 0.0)

    running = seconds(first, slope, cost, knees)
    free = overhead + running
    pace = np.where(first > 0, (running - cost) / np.where(first > 0, first, 1), 0.0)
    done, pieces = first.astype(float), (first > 0).astype(np.int64)
    if most is not None:  # a load beyond the memory is run in several
        pieces = -(-first // most)
        running = running + np.maximum(pieces - 1, 0) * cost
        free = overhead + running
    expected = piece_plan.speeds.copy()
    if present is not None:
        free, expected = np.where(present, free, np.inf), np.where(present, expected, 0.0)
    told = ~np.isfinite(free)
    claimed, took_claims = np.zeros(shape), np.zeros(shape)
    known = (expected.sum(-1) > 0)[rows]

    def claim(pool: Array, batch: Array, measuring: bool) -> None:
        left, number = pool.copy(), 0
        while left.any():
            number += 1
            if number > CLAIMS + 20 * shape[-1]:
                raise PacelineError(
                    f"a round of {loads.sum(-1).max():,} samples comes to more than {number - 1:,} pieces; choose "
                    "larger pieces, or a policy that plans whole rounds"
                )
            who = np.argmin(free - ahead * running, axis=-1)
            at = rows, who
            busy = free[at] - overhead[at] - pieces[at] * cost[at]
            measured = (done[at] > 0) & (busy > 0) & known & measuring
            expected[at] = np.where(measured, done[at] / np.where(measured, busy, 1.0), expected[at])
            told[at] |= measured
            samples = rule.claim(
                piece_plan,
                at,
                told=np.asarray(told.all(-1)),
                left=left,
                batch=batch,
                held=done[at] + kept[at],
                speed=expected[at],
                together=expected.sum(-1),
                workers=shape[-1],
                most=np.inf if most is None else most,
                unit=unit,
            )
            asking = np.maximum(CLAIM_SECONDS - ahead * running[at], 0.0)
            ran = seconds(samples, slope[at], cost[at], knees[at])
            claimed[at] += samples
            took_claims[at] += ran - np.where(samples > 0, cost[at], 0.0)
            took = np.where(samples > 0, asking + ran, 0.0)
            running[at] = np.where(samples > 0, took, running[at])
            free[at] += took
            done[at] += samples
            pieces[at] += samples > 0
            left -= samples

    claim(pool, loads.sum(-1) - orphaned, True)
    free = free + seconds(kept, slope, cost, knees)
    done, pieces = done + kept, pieces + (kept > 0)
    idle = np.zeros(shape)
    if orphaned.any():
        idle = np.where(np.isfinite(free) & (orphaned > 0)[:, None], np.maximum(missed - free, 0.0), 0.0)
        free = free + idle
        # With the wait in it, the time that a worker took is no measure of its speed.
        claim(orphaned, loads.sum(-1), False)
    expected_seconds = pace * claimed
    strayed = np.where(pace > 0, np.abs(took_claims - expected_seconds), 0.0)
    return PlayedRound(done.astype(np.int64), free, pieces, idle, expected_seconds, strayed)
