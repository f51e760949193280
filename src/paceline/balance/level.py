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
from paceline.costs import Linear, line_through, line_through_few
from paceline.few import Values, few, numbers
from paceline.forecast import Reading, kalman
from paceline.rounds import Cluster, Plan, Round
from paceline.shares import plain, water_level

PROBE = 0.01  # each round without load, a worker is taken to be that much quicker than when last measured


class LevelState(NamedTuple):
    pace: Any  # of the tracking or the forecast
    overhead: Values  # seconds, (..., n)
    idle: Values  # rounds that a worker has been there without load, (..., n)
    level: Any  # seconds: where the next search starts, (...,)
    expected: Values  # seconds per sample, (..., n); NaN where nothing is expected yet
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
        if few(round.shares) and (found := self._step_few(state, round)) is not None:
            return found
        cluster, present = self.cluster, round.present
        overhead, idle, expected = map(np.asarray, (state.overhead, state.idle, state.expected))
        state = state._replace(overhead=overhead, idle=idle, expected=expected)
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

    def _step_few(self, state: LevelState, round: Round) -> tuple[Plan, LevelState] | None:
        """The same in plain numbers, where all were there and measured, now and before; None where that is not so."""
        if self.forecast != "tracking" or not all(round.present.tolist()) or any(numbers(state.idle)):
            return None
        apart = round.overhead.tolist()
        measured = line_through_few(round.shares.tolist(), round.batch, round.seconds.tolist(), apart)
        if measured is None or (followed := kalman.follow_few(state.pace, measured)) is None:
            return None
        expected, gains, pace = followed
        before = numbers(state.overhead)
        overheads = [gain * (now - then) + then for gain, now, then in zip(gains, apart, before, strict=True)]
        errors = caution.learn_few(state.errors, numbers(state.expected), before, measured, apart)
        costs = None if errors is None else caution.cautious_few(expected, overheads, errors)
        if errors is None or costs is None:
            return None
        batch = self.cluster.global_batch
        low, high = self.cluster.bounds
        filled = plain.fill(*costs, float(batch), low, high, float(state.level))
        if filled is None:
            return None
        level, loads = filled
        shares = np.array([load / batch for load in loads])
        plan = Plan(shares, costs=Linear(np.array(costs[0]), np.array(costs[1])))
        return plan, LevelState(pace, overheads, state.idle, level, expected, errors)
