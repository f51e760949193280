"""How early an uncertain worker should aim to end, so that the slowest of all is soonest on average.

Aiming everybody at the same time is best only where times are certain. Where they scatter, the round waits for
whoever happens to be late, and being late should fall to the workers whose load is worth it: at the best
division each worker is the last with a probability in proportion to its speed (the gradient of the mean of the
maximum over the loads is then the same for all). So each aims to end by the level with all but about that
probability: a quantile of its seconds, high for slow workers and low for quick ones. As the level is common, this
is water filling on seconds inflated to those quantiles. The stochastic programme itself, solved on hundreds of
sampled futures, finds nothing better (benchmarks/simulation.py).

Margins make the differences between workers larger, and that must not feed itself: where seconds hardly depend on
the load, a worker with less load looks slower, gets a larger margin, and so even less load. A difference of speeds
grows by up to 0.92 times the scatter (the slope of the quantile, three workers) and shrinks by the portion by which
seconds grow with the load. So margins count no scatter beyond ``MOST``: where that portion is a tenth, they never
drive equal workers apart. Where speeds differ by much, this costs 0.4 % of the time at a scatter of 0.3 (profile
"A noise" of the same benchmark).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from paceline.costs import Linear
from paceline.forecast.portable_math import exp, log, quantile
from paceline.rounds import Array

MEMORY = 0.95  # weight of the errors before, each round
DEVIATION = 1.2533  # standard deviation of a normal variable over its mean absolute one
OWN = 0.2  # weight of a worker's own errors in its scatter; the rest are all workers'
MOST = 0.1  # scatter of a pace beyond which margins grow no more: see above
UNUSUAL = 3.0  # errors are cut to this many usual ones: a change of speed is no scatter


class Errors(NamedTuple):
    """How far off the expectations usually are: mean absolute errors, and what weight they have; (..., n)."""

    pace: Array  # of the logarithm of seconds per sample
    overhead: Array  # seconds
    weight: Array


def start(shape: tuple[int, ...]) -> Errors:
    """Nothing expected yet; shape is (..., n)."""
    nothing = np.zeros(shape)
    return Errors(nothing, nothing, nothing)


def learn(errors: Errors, expected: Linear, pace: Array, overhead: Array) -> Errors:
    """Errors after one more round: ``pace`` and ``overhead`` as measured, NaN where they were not."""
    with np.errstate(divide="ignore", invalid="ignore"):
        off = np.abs(log(pace / expected.seconds_per_sample))
    late = np.abs(overhead - expected.overhead)
    known = np.isfinite(off)
    if not known.all():
        off, late = np.where(known, off, 0.0), np.where(known, late, 0.0)
    usual, usually = scatter(errors)
    seen = errors.weight > 0
    off = np.where(seen, np.minimum(off, UNUSUAL * usual), off)
    late = np.where(seen, np.minimum(late, UNUSUAL * usually), late)
    keep = np.where(known, MEMORY, 1.0)
    return Errors(keep * errors.pace + off, keep * errors.overhead + late, keep * errors.weight + known)


def scatter(errors: Errors) -> tuple[Array, Array]:
    """Standard deviations of the pace's logarithm and of the overhead, (..., n); 0 while nothing is known."""
    weight = np.maximum(errors.weight, 1e-9)
    together = np.maximum(errors.weight.sum(-1, keepdims=True), 1e-9)

    def deviation(sums: Array) -> Array:
        mean = OWN * sums / weight + (1 - OWN) * sums.sum(-1, keepdims=True) / together
        return DEVIATION * mean

    return deviation(errors.pace), deviation(errors.overhead)


def cautious(expected: Linear, errors: Errors) -> Linear:
    """The seconds by which each worker ends with all but its own probability of being the last."""
    pace, overhead = scatter(errors)
    speed = 1.0 / expected.seconds_per_sample
    last = np.minimum(speed / speed.sum(-1, keepdims=True), 0.5)
    margin, pace = -quantile(last), np.minimum(pace, MOST)
    with np.errstate(over="ignore"):  # who strays without measure may well take forever
        return Linear(expected.seconds_per_sample * exp(margin * pace), expected.overhead + margin * overhead)
