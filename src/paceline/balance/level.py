"""``level``: everybody ends at the same time, by what each may be expected to need.

Water filling on the workers' paces and overheads: the same solution that the oracle finds for the true ones,
with a margin where they are uncertain.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from paceline.balance import caution
from paceline.balance.forecasting import Forecasting
from paceline.balance.members import bounds, even, fill_unknown
from paceline.balance.protocol import Policy
from paceline.costs import Linear, line_through
from paceline.forecast import Reading, kalman
from paceline.rounds import Array, Cluster, Plan, Round
from paceline.shares import water_level

PROBE = 0.01  # each round without load, a worker is taken to be that much quicker than when last measured


class LevelState(NamedTuple):
    pace: Any  # of the tracking or the forecast
    overhead: Array  # seconds, (..., n)
    idle: Array  # rounds that a worker has been there without load, (..., n)
    level: Array  # seconds: where the next search starts, (...,)
    expected: Array  # seconds per sample, (..., n); NaN where nothing is expected yet
    errors: caution.Errors


@dataclass(frozen=True)
class Level(Forecasting, Policy[LevelState]):
    """Water filling: shares with which all are expected to end at the same time.

    forecast: where the expected paces come from. "tracking" averages noise and follows changes at once, by
        itself; or any forecast's name, with its options after a colon and ";" between them.
    """

    cluster: Cluster
    forecast: str = "tracking"

    def __post_init__(self) -> None:
        self.forecaster()  # an unknown one is said now, not in the first round

    def init(self) -> tuple[Plan, LevelState]:
        shape = self.cluster.shape
        tracked = self.forecast == "tracking"
        pace = kalman.start(shape) if tracked else self.forecaster().init(shape)
        nothing, unknown = np.zeros(shape), np.full(shape, np.nan)
        errors = caution.start(shape)
        state = LevelState(pace, nothing, nothing, np.full(shape[:-1], np.nan), unknown, errors)
        return Plan(even(self.cluster)), state

    def step(self, state: LevelState, round: Round) -> tuple[Plan, LevelState]:
        cluster, present = self.cluster, round.present
        measured = line_through(round.loads, round.seconds, round.overhead, np.nan)
        if self.forecast == "tracking":
            expected, gain, pace = kalman.follow(state.pace, measured)
        else:
            reading = Reading(1.0 / measured, round.cpu, round.memory)
            speed, pace = self.forecaster().step(state.pace, reading)
            expected, gain = 1.0 / speed, np.ones(cluster.shape)

        before = Linear(state.expected, state.overhead)
        errors = caution.learn(state.errors, before, measured, round.overhead)
        idle, overhead = state.idle, gain * (round.overhead - state.overhead)
        overhead += state.overhead
        unmeasured = np.isnan(measured)
        if unmeasured.any():
            idle = np.where(unmeasured, idle + (present & (round.loads <= 0)), 0.0)
            # Once found too slow for a single sample, a worker is tried again, the later the slower it was.
            expected = fill_unknown(expected) / (1.0 + PROBE * idle)
            overhead = np.where(unmeasured, np.where(present, round.overhead, state.overhead), overhead)
        elif state.idle.any():
            idle = np.zeros(cluster.shape)

        least, most = bounds(cluster, present)
        batch = cluster.global_batch
        costs = caution.cautious(Linear(expected, overhead), errors)
        level, loads = water_level(costs, batch, least * batch, most * batch, guess=state.level)
        if not present.all():  # whole samples, too, must not go to the absent
            costs = Linear(np.where(present, costs.seconds_per_sample, np.inf), costs.overhead)
        loads /= batch
        return Plan(loads, costs=costs), LevelState(pace, overhead, idle, level, expected, errors)
