"""``lbbsp-cpu`` and ``lbbsp-gpu``: the full LB-BSP, which forecasts the speeds and equalises the times."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from paceline.balance.members import bounds, even, fill_unknown
from paceline.balance.protocol import Forecasting, Policy
from paceline.costs import Linear, line_through
from paceline.errors import PacelineError
from paceline.forecast import Reading, create
from paceline.forecast.protocol import smoothed
from paceline.rounds import Array, Cluster, Plan, Round
from paceline.shares import water_level

COMMUNICATION_GAIN = 0.2  # of the moving average of t^m


class PredictiveState(NamedTuple):
    forecast: Any  # the forecast's own state
    overhead: Array  # moving average of t^m, seconds, (..., n); NaN before


@dataclass(frozen=True)
class LbbspCpu(Forecasting, Policy[PredictiveState]):
    """LB-BSP for CPU clusters: shares in proportion to the forecast speeds (communication is ignored).

    LB-BSP, section 3.2 (processors).

    Args:
        cluster: The workers and their limits.
        forecast: The forecast's name, with its options after a colon and ";" between them.
    """

    cluster: Cluster
    forecast: str = "ema"

    def __post_init__(self) -> None:
        create(self.forecast)  # raises for an unknown one now, not in the first round

    def init(self) -> tuple[Plan, PredictiveState]:
        shares = even(self.cluster)
        state = self.forecaster().init(self.cluster.shape)
        return Plan(shares), PredictiveState(state, np.full_like(shares, np.nan))

    def step(self, state: PredictiveState, round: Round) -> tuple[Plan, PredictiveState]:
        cluster, present = self.cluster, round.present
        unknown = np.full_like(round.seconds, np.nan)
        measured = line_through(round.loads, round.seconds, round.overhead, unknown)
        reading = Reading(np.where(round.fresh, 1.0 / measured, np.nan), round.cpu, round.memory)
        speed, after = self.forecaster().step(state.forecast, reading)
        overhead = self._communication(state.overhead, round)
        slope = fill_unknown(1.0 / speed)
        batch = cluster.global_batch
        least, most = bounds(cluster, present)
        costs = Linear(slope, np.nan_to_num(overhead))
        loads = water_level(costs, batch, *self._within(least * batch, most * batch)).loads
        if not present.all():  # rounding to whole samples must not give any to absent workers
            costs = Linear(np.where(present, slope, np.inf), costs.overhead)
        return Plan(loads / batch, costs=costs), PredictiveState(after, overhead)

    def train(self, state: PredictiveState) -> PredictiveState:
        return state._replace(forecast=self.forecaster().train(state.forecast))

    def _communication(self, overhead: Array, round: Round) -> Array:
        return np.zeros_like(round.seconds)

    def _within(self, least: Array, most: Array) -> tuple[Array, Array]:
        return least, most


@dataclass(frozen=True)
class LbbspGpu(LbbspCpu):
    """Equal times with communication, from the knee to the memory's end (LB-BSP, eqs. (3), (5), section 3.3).

    Args:
        cluster: The workers and their limits.
        forecast: The forecast's name, with its options after a colon and ";" between them.
        knee: x^s, samples below which a GPU is no quicker; every present worker gets at least as many. The upper end
            x^o is the cluster's ``most``; if knees differ between workers, give them as its ``least``.
    """

    knee: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        needed = np.maximum(self.cluster.least, self.knee).sum()
        if not (0 <= self.knee <= self.cluster.most.min() and needed <= self.cluster.global_batch):
            raise PacelineError(
                f"policy 'lbbsp-gpu': knee={self.knee:g}: not all {self.cluster.workers} workers can take as "
                f"many within their limits and the global batch of {self.cluster.global_batch}; lower it"
            )

    def _communication(self, overhead: Array, round: Round) -> Array:
        return smoothed(overhead, round.overhead, COMMUNICATION_GAIN, round.present & round.fresh)

    def _within(self, least: Array, most: Array) -> tuple[Array, Array]:
        return np.minimum(np.maximum(least, self.knee), most), most
