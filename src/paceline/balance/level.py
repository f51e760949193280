"""``level``: everybody ends at the same time, by what each was last seen to need. The default."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import numpy as np

from paceline.balance.members import bounds, even, fill_unknown
from paceline.costs import Linear, line_through
from paceline.rounds import Array, Cluster, Plan, Round
from paceline.shares import water_level


class LevelState(NamedTuple):
    seconds_per_sample: Array  # (..., n); NaN before a worker's first measurement
    overhead: Array  # (..., n), seconds
    level: Array  # (...,), seconds: where the next search starts


@dataclass(frozen=True)
class Level:
    """Water filling: shares with which all expect to end at the same time."""

    cluster: Cluster
    needs_upcoming: ClassVar[bool] = False

    def init(self) -> tuple[Plan, LevelState]:
        shares = even(self.cluster)
        unknown = np.full_like(shares, np.nan)
        return Plan(shares), LevelState(unknown, np.zeros_like(shares), np.zeros(self.cluster.realizations))

    def step(self, state: LevelState, round: Round) -> tuple[Plan, LevelState]:
        cluster, present = self.cluster, round.present
        slope = line_through(round.loads, round.seconds, round.overhead, state.seconds_per_sample)
        overhead = round.overhead if present.all() else np.where(present, round.overhead, state.overhead)
        expected = fill_unknown(slope)
        least, most = bounds(cluster, present)
        batch = cluster.global_batch
        level, loads = water_level(Linear(expected, overhead), batch, least * batch, most * batch)
        if not present.all():  # whole samples, too, must not go to the absent
            expected = np.where(present, expected, np.inf)
        return Plan(loads / batch, costs=Linear(expected, overhead)), LevelState(slope, overhead, level)
