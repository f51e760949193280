"""Telling a worker's overhead from its speed, round by round.

    seconds = overhead + seconds_per_sample * load

A Kalman filter for each worker holds both numbers and how sure it is of each. Two things would mislead it,
since the loads come from a balancer that follows the same measurements: a speed that drifts looks like
overhead (the load falls as the worker slows, its seconds stay the same), and noise that the balancer chases
like less of it. So only changes of load well beyond the scatter may teach anything about the overhead; the
others move the speed alone. What does not fit at all is a change of speed: it is followed at once and the
overhead stays; when the next round speaks for the old speed again, it was a spike. As long as it may be one, what
the seconds differ by teaches nothing about the overhead. And what does not fit just when the load has changed may as
well be due to the overhead, which is then as uncertain as at first.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from paceline.forecast.portable_math import log
from paceline.rounds import Array

__all__ = ["OverheadFit", "certain", "start", "update"]

GUESS = 0.35  # of a first round's seconds: how large an overhead is thought possible before loads have varied
SCATTER = 0.02  # relative scatter of the seconds before it is known
LEAST_SCATTER = 0.003
JUMP = 4.0  # standard deviations that no scatter explains
JUMP_LEAST = 0.1  # and the relative change below which it is not worth a new start
VARIED = 0.1  # relative change of load (and of a spike's pace) that may teach about overhead, if it is
ALIKE = 0.09  # relative change of load that is surely less
VARIED_SCATTERS = 4.0  # this many times the scatter, too
NOTHING = 1e-9  # samples, a fraction of one: its seconds tell nothing, and its square would be none
MOST = 0.8  # portion of the seconds behind a jump that may be overhead
DOUBT = 2.0  # standard errors by which an overhead may be less than it is estimated
MEMORY = 0.2  # weight of a round in the load that changes are measured from, and in the scatter


class OverheadFit(NamedTuple):
    """What is believed of each worker; all of shape (..., n), NaN before a worker's first round with load."""

    overhead: Array  # seconds
    seconds_per_sample: Array
    overhead_var: Array
    covar: Array
    slope_var: Array
    scatter: Array  # relative variance of a round's seconds, and of the speed's drift between rounds
    load: Array  # what it usually runs, samples
    before: (
        Array  # seconds per sample before the last round, or the last two, where these were jumps; else NaN
    )


def start(shape: tuple[int, ...]) -> OverheadFit:
    """Nothing known yet; shape is (..., n)."""
    blank = OverheadFit(*[np.full(shape, np.nan)] * len(OverheadFit._fields))
    return blank._replace(scatter=np.full(shape, SCATTER**2))


def certain(fit: OverheadFit) -> Array:
    """What of the overheads is certain, in seconds, (..., n); 0 while nothing is known.

    Who plans by too small an overhead comes to the best division a few rounds later. By too large a one, differences
    that are noise grow.
    """
    least = fit.overhead - DOUBT * np.sqrt(np.maximum(fit.overhead_var, 0.0))
    return np.where(least > 0, least, 0.0)


def update(fit: OverheadFit, loads: Array, seconds: Array, known: Array | float = 0.0) -> OverheadFit:
    """The belief after one more round.

    loads: samples run; seconds: compute seconds, NaN for the absent; both of shape (..., n). Rounds without
        load teach nothing. known: the part of the seconds that the engine itself measured to be overhead;
        the fit is of the rest. Until a worker's load has varied, the overhead is 0 (beyond the known part).
    """
    with np.errstate(invalid="ignore", divide="ignore"):  # NaN wherever nothing is known; replaced at the end
        here = (loads > NOTHING) & np.isfinite(seconds)
        all_here = here.all()
        b = loads if all_here else np.where(here, loads, 1.0)
        t = seconds - known
        t = np.maximum(t if all_here else np.where(here, t, 1.0), 1e-12)

        part = fit.seconds_per_sample * b
        r = fit.slope_var + fit.scatter * fit.seconds_per_sample**2
        p, q = fit.overhead_var + 0.1 * fit.scatter * fit.overhead**2, fit.covar
        expected = fit.overhead + part
        squared = expected**2
        noise = fit.scatter * squared
        variance = p + 2 * b * q + b**2 * r + noise
        off = t - expected
        far = off**2
        jump = far > JUMP**2 * variance
        if jump.any():
            jump &= np.abs(off) > JUMP_LEAST * np.minimum(t, expected)

        change = b - fit.load
        alike = (np.abs(change) <= ALIKE * fit.load).all()  # False in a first round
        varied = np.zeros(here.shape, bool)
        if not alike:
            beyond = np.maximum(VARIED, VARIED_SCATTERS * np.sqrt(fit.scatter))
            varied = np.abs(log(b / fit.load)) > beyond
        teaching = varied
        slope, before = fit.seconds_per_sample, fit.before
        if not np.isnan(before).all():
            # The last round was a spike where the speed before it explains this one better than the spike does, or
            # where a sample of fewer takes less than it did then: no overhead is negative.
            usual = fit.overhead + before * b
            over = np.abs(log(t / usual)) < np.abs(log(t / expected))
            if varied.any():
                spike = (fit.overhead + slope * fit.load) / fit.load
                over |= varied & (change < 0) & (log(t / b / spike) < -beyond) & ~np.isnan(before)
                # With another overhead, the speed before would explain it, too.
                unclear = (t - usual) ** 2 < JUMP**2 * variance
                teaching = varied & (over | ~unclear)
            slope, off = np.where(over, before, slope), np.where(over, t - usual, off)
            far, before = off**2, np.full(here.shape, np.nan)
            jump &= ~over | (far > JUMP**2 * variance)

        gain = (q + b * r) / variance
        overhead, slope = fit.overhead, slope + gain * off
        # The variances for any gains, best or not (Joseph's form).
        d, e = -gain, 1 - gain * b
        overhead_var, covar = p, d * p + e * q
        slope_var = d * d * p + 2 * d * e * q + e * e * r + gain**2 * noise
        if not alike:
            toward = np.where(teaching, (p + b * q) / variance, 0.0)
            overhead = overhead + toward * off
            a, c = 1 - toward, -toward * b
            overhead_var = a * a * p + 2 * a * c * q + c * c * r + toward**2 * noise
            covar = a * d * p + (a * e + c * d) * q + c * e * r + toward * gain * noise
        kept = np.minimum(np.maximum(overhead, 0.0), 0.95 * t)  # the slope moves along with what is cut
        slope = np.maximum(slope + (kept - overhead) * covar / overhead_var, 0.01 * t / b)

        # How far off the seconds were, as far as scatter rather than ignorance was to blame.
        blame = fit.scatter * (squared + part**2) / variance
        surprise = np.minimum(far / variance, JUMP**2) - 1.0
        scatter = np.maximum(fit.scatter * (1.0 + MEMORY * blame * surprise), LEAST_SCATTER**2)

    load = fit.load + MEMORY * change
    updated = OverheadFit(kept, slope, overhead_var, covar, slope_var, scatter, load, before)
    if all_here and alike and not jump.any():
        return updated
    first = here & np.isnan(fit.overhead)
    fresh = here & (jump | first)
    if all_here and not fresh.any():
        return updated
    base = np.where(first, 0.0, np.minimum(fit.overhead, MOST * t))
    unsure = np.where(first | varied, np.fmax(p, (GUESS * t) ** 2), p)

    restarted = OverheadFit(
        overhead=base,
        seconds_per_sample=(t - base) / b,
        overhead_var=unsure,
        covar=-unsure / b,
        slope_var=(unsure + fit.scatter * t**2) / b**2,
        scatter=fit.scatter,
        load=b,
        # Of two jumps in a row, the speed before both.
        before=np.where(first, np.nan, np.where(np.isnan(fit.before), fit.seconds_per_sample, fit.before)),
    )
    return OverheadFit(
        *(
            np.where(fresh, new, np.where(here, moved, old))
            for new, moved, old in zip(restarted, updated, fit, strict=True)
        )
    )
