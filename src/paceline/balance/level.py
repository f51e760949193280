"""``level``: all workers end at the same time, by the seconds expected of each.

This is water filling on the workers' paces and overheads, the solution that the oracle finds for the true ones, with
margins for uncertainty: how early should an uncertain worker aim to end, so that the slowest of all ends soonest on
average? The same aim for all is best only if times are certain. If they scatter, the round waits for the worker that
happens to be late, and that should more often be a worker that does much: at the best division each worker is the
last with a probability in proportion to its speed (the gradient of the mean of the maximum over the loads is then the
same for all). So each aims to end by the level except with about that probability: a quantile of its seconds, high
for slow workers and low for quick ones. As the level is common, this is water filling on seconds inflated to those
quantiles. The stochastic programme itself, solved on hundreds of sampled futures, finds nothing better
(benchmarks/simulation.py).

Margins make the differences between workers larger, and this must not amplify itself: if seconds hardly depend on
the load, a worker with less load looks slower, gets a larger margin, and so even less load. So no margin enlarges a
difference of paces by more than ``GROWTH`` of it: equal workers never drift apart if the portion by which seconds
grow with the load is larger than that. Nearly equal workers get nearly no margins; workers whose speeds differ much
get nearly the whole ones (profile "A noise" of the same benchmark).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from paceline.balance.members import bounds, even, fill_unknown
from paceline.balance.protocol import Forecasting, Policy
from paceline.costs import Linear, line_through
from paceline.forecast import Reading, create, tracking
from paceline.forecast.portable_math import exp, log, quantile
from paceline.rounds import Array, Cluster, Plan, Round
from paceline.shares import water_level

PROBE = 0.01  # for each round with the lowest load, a worker is assumed this much quicker than measured
FEW = 1e-3  # of an equal share: up to this load, the seconds say nothing about the pace
MEMORY = 0.95  # factor on the weight of earlier errors, each round
DEVIATION = 1.2533  # ratio of a normal variable's standard deviation to its mean absolute deviation
GROWTH = 0.04  # the most by which margins enlarge a difference of paces (logarithms), as a part of it
UNUSUAL = 3.0  # errors are cut to this many usual ones, since a change of speed is not scatter


class Errors(NamedTuple):
    """The usual errors of the expectations, over all workers: weighted sums, and their number; (..., 1)."""

    pace: Array  # of the logarithm of seconds per sample
    overhead: Array  # seconds
    number: Array


class LevelState(NamedTuple):
    pace: Any  # state of the tracking or the forecast
    overhead: Array  # seconds, (..., n)
    idle: Array  # rounds in which a worker has been present with its lowest load, or none, (..., n)
    level: Array  # seconds: where the next search starts, (...,)
    expected: Array  # seconds per sample, (..., n); NaN if unknown
    errors: Errors


@dataclass(frozen=True)
class Level(Forecasting, Policy[LevelState]):
    """Water filling: shares with which all are expected to end at the same time.

    Args:
        cluster: The workers and their limits.
        forecast: The source of the expected paces. "tracking" averages noise and follows changes at once, and needs
            no settings; or the name of any forecast, with its options after a colon and ";" between them.
    """

    cluster: Cluster
    forecast: str = "tracking"

    def __post_init__(self) -> None:
        create(self.forecast)  # raises for an unknown one now, not in the first round

    @cached_property
    def few(self) -> float:
        """The load in samples up to which the seconds say nothing about the pace."""
        return FEW * self.cluster.global_batch / self.cluster.workers

    @cached_property
    def lowest(self) -> Array:
        """The fewest whole samples that each worker gets, (n,); 0 if an equal share is not more."""
        lowest = np.maximum(self.cluster.least, 1.0)
        return np.where(lowest * self.cluster.workers < self.cluster.global_batch, lowest, 0.0)

    def init(self) -> tuple[Plan, LevelState]:
        shape = self.cluster.shape
        pace = tracking.start(shape) if self.forecast == "tracking" else self.forecaster().init(shape)
        nothing, unknown = np.zeros(shape), np.full(shape, np.nan)
        errors = nothing_expected(shape)
        state = LevelState(pace, nothing, nothing, np.full(shape[:-1], np.nan), unknown, errors)
        return Plan(even(self.cluster)), state

    def step(self, state: LevelState, round: Round) -> tuple[Plan, LevelState]:
        cluster, present = self.cluster, round.present
        loads = round.loads
        measured = line_through(loads, round.seconds, round.overhead, np.nan)
        few, idle = loads <= self.few, state.idle
        lowest = few | (loads == self.lowest)
        unknown = few if round.gradients is None else few | round.gradients.late
        if unknown.any():
            measured = np.where(unknown, np.nan, measured)
        if self.forecast == "tracking":
            expected, gain, pace = tracking.follow(state.pace, measured)
        else:
            reading = Reading(1.0 / measured, round.cpu, round.memory)
            speed, pace = self.forecaster().step(state.pace, reading)
            expected, gain = 1.0 / speed, np.ones(cluster.shape)

        before = Linear(state.expected, state.overhead)
        errors = learn_errors(state.errors, before, measured, round.overhead)
        overhead = gain * (round.overhead - state.overhead)
        overhead += state.overhead
        unmeasured = np.isnan(measured)
        if unmeasured.any():
            expected = fill_unknown(expected)
            overhead = np.where(unmeasured, np.where(present, round.overhead, state.overhead), overhead)

        least, most = bounds(cluster, present)
        batch = cluster.global_batch
        costs = cautious(Linear(expected, overhead), errors)
        if lowest.any() or idle.any():
            # The lowest load says little about larger ones, so these are tried again, later for slower workers.
            idle = np.where(lowest, idle + present, np.where(unmeasured, idle, 0.0))
            costs = Linear(costs.seconds_per_sample / (1.0 + PROBE * idle), costs.overhead)
        level, loads = water_level(costs, batch, least * batch, most * batch, guess=state.level)
        if not present.all():  # rounding to whole samples must not give any to absent workers
            costs = Linear(np.where(present, costs.seconds_per_sample, np.inf), costs.overhead)
        loads /= batch
        return Plan(loads, costs=costs), LevelState(pace, overhead, idle, level, expected, errors)

    def train(self, state: LevelState) -> LevelState:
        return state._replace(pace=self.forecaster().train(state.pace))


def nothing_expected(shape: tuple[int, ...]) -> Errors:
    """The errors before any round; shape is (..., n)."""
    nothing = np.zeros((*shape[:-1], 1))
    return Errors(nothing, nothing, nothing)


def learn_errors(errors: Errors, expected: Linear, pace: Array, overhead: Array) -> Errors:
    """The errors after one more round. pace, overhead: as measured, NaN if not measured."""
    with np.errstate(divide="ignore", invalid="ignore"):
        off = np.abs(log(pace / expected.seconds_per_sample))
    late = np.abs(overhead - expected.overhead)
    known = np.isfinite(off)
    number = MEMORY * errors.number + known.sum(-1, keepdims=True)
    if not known.all():
        off, late = np.where(known, off, 0.0), np.where(known, late, 0.0)
    usual, delay = (UNUSUAL * each for each in scatter(errors))
    if not (before := errors.number > 0).all():  # no usual error is known yet
        usual, delay = (np.where(before, each, np.inf) for each in (usual, delay))
    off, late = np.minimum(off, usual), np.minimum(late, delay)
    pace, overhead = MEMORY * errors.pace, MEMORY * errors.overhead
    return Errors(pace + off.sum(-1, keepdims=True), overhead + late.sum(-1, keepdims=True), number)


def scatter(errors: Errors) -> tuple[Array, Array]:
    """Standard deviations of the pace's logarithm and of the overhead, (..., 1); 0 while nothing is known."""
    number = np.maximum(errors.number, 1e-9)
    return DEVIATION * errors.pace / number, DEVIATION * errors.overhead / number


def cautious(expected: Linear, errors: Errors) -> Linear:
    """The quantiles of each worker's seconds, those that it exceeds with its own probability of being the last.

    Paces are inflated relative to the quickest worker's, since a factor common to all changes no division.
    """
    pace, overhead = scatter(errors)
    speed = 1.0 / expected.seconds_per_sample
    last = np.minimum(speed / speed.sum(-1, keepdims=True), 0.5)
    margin = -quantile(last)
    beyond = margin - margin.min(-1, keepdims=True)
    larger = np.minimum(pace * beyond, GROWTH * log(speed.max(-1, keepdims=True) / speed))
    return Linear(expected.seconds_per_sample * exp(larger), expected.overhead + margin * overhead)
