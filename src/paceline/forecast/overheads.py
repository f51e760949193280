"""Estimates of each worker's overhead and speed, round by round.

    seconds = overhead + seconds_per_sample * load

A Kalman filter for each worker holds both numbers and their variances. Two effects would mislead it, since the
loads come from a balancer that follows the same measurements: a speed that drifts looks like overhead (the load
falls as the worker slows, and its seconds stay the same), and noise that the balancer follows looks like less
overhead. So only changes of load well beyond the scatter update the overhead; others update the speed alone. A
measurement that does not fit at all is a change of speed: it is followed at once and the overhead stays; if the next
round fits the old speed again, it was a spike. As long as it may be one, its error does not update the overhead. And
a measurement that does not fit just when the load has changed may be due to the overhead as well, which is then as
uncertain as at first.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from paceline.forecast.portable_math import exp
from paceline.rounds import Array

__all__ = ["OverheadFit", "certain", "start", "update"]

GUESS = 0.35  # of a first round's seconds: standard deviation of the overhead before loads have varied
SCATTER = 0.02  # relative scatter of the seconds before it is known
LEAST_SCATTER = 0.003
JUMP = 4.0  # standard deviations beyond which an error counts as a change of speed,
JUMP_LEAST = 0.1  # and the relative change below which it does not
VARIED = 0.1  # relative change of load (and of a spike's pace) from which the overhead may be updated,
VARIED_SCATTERS = 4.0  # if it is also this many times the scatter
ALIKE = 0.09  # relative change of load that is certainly less than ``VARIED``
NOTHING = 1e-9  # samples: up to this load the seconds say nothing, and its square is too small
MOST = 0.8  # portion of the seconds after a jump that may be overhead
DOUBT = 2.0  # standard errors by which an overhead may be less than its estimate
MEMORY = 0.2  # weight of a round in the usual load and in the scatter


class OverheadFit(NamedTuple):
    """The estimates of each worker; all of shape (..., n), NaN before a worker's first round with load.

    Attributes:
        overhead: Seconds at load 0.
        seconds_per_sample: The slope.
        overhead_var: Variance of the overhead's estimate.
        covar: Covariance of the two estimates.
        slope_var: Variance of the slope's estimate.
        scatter: Relative variance of a round's seconds, and of the speed's drift between rounds.
        load: Moving average of the load, samples.
        before: Seconds per sample before the last round, or the last two, if these were jumps; else NaN.
    """

    overhead: Array
    seconds_per_sample: Array
    overhead_var: Array
    covar: Array
    slope_var: Array
    scatter: Array
    load: Array
    before: Array


def start(shape: tuple[int, ...]) -> OverheadFit:
    """The estimates before any round.

    Args:
        shape: Shape of each estimate, (..., n).

    Returns:
        Estimates that know nothing.
    """
    blank = OverheadFit(*[np.full(shape, np.nan)] * len(OverheadFit._fields))
    return blank._replace(scatter=np.full(shape, SCATTER**2))


def certain(fit: OverheadFit) -> Array:
    """The certain part of the overheads.

    With too small an overhead, a plan reaches the best division a few rounds later. With too large a one, it
    amplifies differences that are noise.

    Args:
        fit: The estimates.

    Returns:
        Seconds, shape (..., n); 0 while nothing is known.
    """
    least = fit.overhead - DOUBT * np.sqrt(np.maximum(fit.overhead_var, 0.0))
    return np.where(least > 0, least, 0.0)


def update(fit: OverheadFit, loads: Array, seconds: Array, known: Array | float = 0.0) -> OverheadFit:
    """Learn from one more round. Until a worker's load has varied, its overhead is 0 beyond the known part.

    Args:
        fit: The estimates so far.
        loads: Samples that ran, shape (..., n); workers without load learn nothing.
        seconds: Compute seconds, shape (..., n); NaN for absent workers.
        known: The part of the seconds that the engine itself measured to be overhead, shape (..., n) or a number; the
            rest is fitted.

    Returns:
        The new estimates.
    """
    with np.errstate(invalid="ignore", divide="ignore"):  # NaN if unknown; replaced at the end
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
            beyond = exp(np.maximum(VARIED, VARIED_SCATTERS * np.sqrt(fit.scatter)))
            varied = _apart(b, fit.load) > beyond
        teaching = varied
        slope, before = fit.seconds_per_sample, fit.before
        if not np.isnan(before).all():
            # The last round was a spike if the speed before it explains this one better than the spike does, or if
            # with a smaller load a sample takes less time than it did then, since no overhead is negative.
            usual = fit.overhead + before * b
            over = _apart(t, usual) < _apart(t, expected)
            if varied.any():
                spike = (fit.overhead + slope * fit.load) / fit.load
                over |= varied & (change < 0) & (t / b * beyond < spike) & ~np.isnan(before)
                # With another overhead, the speed before could explain it as well.
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

        # The part of the squared error that is due to scatter rather than to uncertain estimates.
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
        # After two jumps in a row, the speed before both.
        before=np.where(first, np.nan, np.where(np.isnan(fit.before), fit.seconds_per_sample, fit.before)),
    )
    return OverheadFit(
        *(
            np.where(fresh, new, np.where(here, moved, old))
            for new, moved, old in zip(restarted, updated, fit, strict=True)
        )
    )


def _apart(first: Array, second: Array) -> Array:
    """How many times as large one of two numbers is as the other, at least 1."""
    return np.maximum(first / second, second / first)
