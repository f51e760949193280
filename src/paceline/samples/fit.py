"""The cost model, measured while the training runs.

    seconds = a_i + p_i * cost,   cost = (1 - w) linear + w quadratic + launch * launches

with one w and one launch for the job, and an overhead a_i and a pace p_i for each worker; all are non-negative, w
is at most 1. ``linear`` and ``quadratic`` are the sums of lengths and of their squares (padded, where they are),
each divided by the data set's mean, so that the mean sample costs 1 whatever w is.

What the rounds told is kept as one small matrix of sums for each worker, which forgets; for given w and launch the
best a_i and p_i follow from it in closed form, and Gauss and Newton find w and launch on what these leave
(variable projection: Golub and Pereyra, 1973; Kaufman's step). All errors are relative to the seconds, so that
slow workers weigh no more than quick ones. A round that does not fit at all counts for little; two in a row on one
worker are a change of its speed, and its sums begin again.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from paceline.costs import Array

__all__ = ["Fit", "start", "update"]

MEMORY = 0.98  # weight of a round's sums after one more
SCATTER = 0.03  # relative scatter of the seconds before it is known
LEAST_SCATTER = 0.003
OUTLIER = 4.0  # standard deviations beyond which a round counts for little,
LEAST_OUTLIER = 0.15  # and relative error below which it does not
STRIKES = 2  # rounds in a row that fit nothing: the worker's speed has changed
PART_SD = 1.0  # how far from 0 the quadratic part is thought to be before anything is known
LAUNCH_SD = 10.0  # the same of a launch, in mean samples
STEPS = 4  # of Gauss and Newton in each round
LINEAR, QUADRATIC, LAUNCHES, OVERHEAD, SECONDS = range(5)


class Fit(NamedTuple):
    """What is believed; n workers.

    sums: products of (linear, quadratic, launches, 1, seconds), each divided by the seconds, (n, 5, 5).
    part: w. launch: of a micro-batch, in mean samples; each of shape (). overhead, pace: a_i, p_i, (n,), NaN
    before a
        worker's first round. scatter: relative variance of the seconds, (). strikes: rounds in a row that did not
        fit, (n,).
    launch_sd: by how much the launch may be wrong, one standard deviation, ().
    """

    sums: Array
    part: Array
    launch: Array
    overhead: Array
    pace: Array
    scatter: Array
    strikes: Array
    launch_sd: Array


def start(workers: int) -> Fit:
    """Nothing known: costs are as given, and a launch costs nothing."""
    nothing, unknown = np.zeros(workers), np.full(workers, np.nan)
    zero = np.zeros(())
    return Fit(
        np.zeros((workers, 5, 5)),
        zero,
        zero,
        unknown,
        unknown,
        np.array(SCATTER**2),
        nothing,
        zero + LAUNCH_SD,
    )


def update(fit: Fit, parts: Array, seconds: Array, *, quadratic: bool = True, memory: float = MEMORY) -> Fit:
    """The belief after one more round.

    parts: linear and quadratic parts in mean samples, and launches, (n, 3). seconds: (n,), NaN where absent; a
    worker without samples teaches nothing. quadratic: w is looked for; else it stays as it is. memory: 1 forgets
    nothing.
    """
    here = np.isfinite(seconds) & (seconds > 0) & (parts[:, LINEAR] > 0)
    if not here.any():
        return fit
    rows = np.zeros((len(seconds), 5))
    rows[here, :3] = parts[here] / seconds[here, None]
    rows[here, OVERHEAD], rows[here, SECONDS] = 1.0 / seconds[here], 1.0

    known = here & ~np.isnan(fit.pace)
    expected = np.where(known, fit.overhead + fit.pace * _costs(fit, parts), np.where(here, seconds, 1.0))
    off = np.where(known, np.log(np.where(here, seconds, 1.0) / np.maximum(expected, 1e-300)), 0.0)
    limit = max(OUTLIER * float(np.sqrt(fit.scatter)), LEAST_OUTLIER)
    far = np.abs(off) > limit
    strikes = np.where(here, np.where(far, fit.strikes + 1, 0.0), fit.strikes)
    changed = strikes >= STRIKES
    weight = np.where(far & ~changed, (limit / np.maximum(np.abs(off), limit)) ** 2, 1.0)
    sums = np.where(here, memory, 1.0)[:, None, None] * fit.sums
    sums = np.where(changed[:, None, None], 0.0, sums)
    sums += (weight * here)[:, None, None] * rows[:, :, None] * rows[:, None, :]
    strikes = np.where(changed, 0.0, strikes)

    fits = known & ~far
    scatter = fit.scatter
    if fits.any():
        mean = float((off[fits] ** 2).mean())
        scatter = np.maximum(scatter + (1 - min(memory, MEMORY)) * 2 * (mean - scatter), LEAST_SCATTER**2)

    part, launch = float(fit.part), float(fit.launch)
    for _ in range(STEPS):
        part, launch, launch_sd = _step(sums, part, launch, float(scatter), quadratic)
    overhead, pace = lines(sums, part, launch)
    seen = sums[:, SECONDS, SECONDS] > 0
    return Fit(
        sums,
        np.array(part),
        np.array(launch),
        np.where(seen, overhead, np.nan),
        np.where(seen, pace, np.nan),
        np.asarray(scatter),
        strikes,
        np.array(launch_sd),
    )


def lines(sums: Array, part: float, launch: float) -> tuple[Array, Array]:
    """The best overhead and pace of each worker, (n,), neither negative, for this w and launch."""
    costs = _direction(part, launch)
    cc, cy = np.einsum("nij,i,j->n", sums, costs, costs), sums[:, :, SECONDS] @ costs
    co, oo, oy = sums[:, :, OVERHEAD] @ costs, sums[:, OVERHEAD, OVERHEAD], sums[:, OVERHEAD, SECONDS]
    determinant = cc * oo - co**2
    # One round, or rounds that are all alike, tell no overhead from a pace: then it is all pace.
    both = determinant > 1e-9 * cc * oo
    safe = np.where(both, determinant, 1.0)
    overhead = np.where(both, (cc * oy - co * cy) / safe, 0.0)
    pace = np.where(both, (oo * cy - co * oy) / safe, 0.0)
    alone = cy / np.where(cc > 0, cc, 1.0)
    pace = np.where((overhead <= 0) | ~both, alone, pace)
    overhead = np.where((overhead <= 0) | ~both, 0.0, overhead)
    negative = pace <= 0
    overhead = np.where(negative, oy / np.where(oo > 0, oo, 1.0), overhead)
    return overhead, np.where(negative, 0.0, pace)


def _costs(fit: Fit, parts: Array) -> Array:
    costs: Array = parts @ _direction(float(fit.part), float(fit.launch))[:3]
    return costs


def _direction(part: float, launch: float) -> Array:
    return np.array([1 - part, part, launch, 0.0, 0.0])


def _step(
    sums: Array, part: float, launch: float, scatter: float, quadratic: bool
) -> tuple[float, float, float]:
    """One step of Gauss and Newton for w and launch; and by how much the launch may be wrong."""
    overhead, pace = lines(sums, part, launch)
    costs = _direction(part, launch)
    residual = np.zeros((len(sums), 5))
    residual[:, SECONDS], residual[:, OVERHEAD] = 1.0, -overhead
    residual -= pace[:, None] * costs
    towards = np.zeros((2, 5))  # how the cost grows with w, and with the launch
    towards[0, LINEAR], towards[0, QUADRATIC] = -1.0, 1.0
    towards[1, LAUNCHES] = 1.0
    # What a change of the worker's own overhead and pace would do as well is not to be learned from.
    spans = np.zeros((len(sums), 2, 5))
    spans[:, 0, OVERHEAD], spans[:, 1] = (overhead > 0) * 1.0, costs
    cross = np.einsum("nai,nij,bj->nab", spans, sums, towards)
    own = np.einsum("nai,nij,nbj->nab", spans, sums, spans)
    own += 1e-12 * np.trace(own, axis1=1, axis2=2)[:, None, None] * np.eye(2) + 1e-300 * np.eye(2)
    full = np.einsum("ai,nij,bj->nab", towards, sums, towards)
    left = full - np.einsum("nca,ncb->nab", cross, np.linalg.solve(own, cross))
    curvature = np.einsum("n,nab->ab", pace**2, left)
    slope = np.einsum("n,ni,nij,aj->a", pace, residual, sums, towards)

    prior = scatter / np.array([PART_SD, LAUNCH_SD]) ** 2
    now, matrix = np.array([part, launch]), curvature + np.diag(prior)
    now = _within(now, slope - prior * now, matrix, np.array([quadratic, True]))
    return float(now[0]), float(now[1]), float(np.sqrt(scatter / matrix[1, 1]))


def _within(now: Array, slope: Array, matrix: Array, free: NDArray[np.bool_]) -> Array:
    """The step to where the slope ends, within 0 <= w <= 1 and 0 <= launch; what is not free stays where it is."""
    while free.any():
        wanted = now.copy()
        wanted[free] += np.linalg.solve(matrix[np.ix_(free, free)], slope[free])
        inside = np.clip(wanted, 0.0, np.array([1.0, np.inf]))
        cut = free & (inside != wanted)
        if not cut.any():
            return wanted
        slope = slope - matrix @ np.where(
            cut, inside - now, 0.0
        )  # the others go on with these at their limits
        now, free = np.where(cut, inside, now), free & ~cut
    return now
