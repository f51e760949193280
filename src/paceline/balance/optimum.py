"""``optimum``: the oracle, which knows the next round's costs and equalises the times exactly."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from paceline.balance.members import bounds, even
from paceline.balance.protocol import Policy
from paceline.costs import Cost, Only
from paceline.errors import PacelineError
from paceline.rounds import Cluster, Plan, Round
from paceline.shares import water_level


@dataclass(frozen=True)
class Optimum(Policy[tuple[()]]):
    """The clairvoyant optimum of each round, for comparison: no policy is quicker (DOLBIE, baseline OPT).

    Args:
        cluster: The workers and their limits.
    """

    cluster: Cluster
    needs_upcoming: ClassVar[bool] = True

    def init(self) -> tuple[Plan, tuple[()]]:
        """Divide equally, since nothing is known yet. If you know the first round's costs, call ``plan``.

        Returns:
            The plan, and an empty state.
        """
        return Plan(even(self.cluster)), ()

    def step(self, state: tuple[()], round: Round) -> tuple[Plan, tuple[()]]:
        if round.upcoming is None:
            raise PacelineError("policy 'optimum' needs the next round's costs; only a simulation has them")
        return self.plan(round.upcoming, round.present), state

    def plan(self, upcoming: Cost, present: NDArray[np.bool_] | None = None) -> Plan:
        """The best plan for a round of the given costs.

        Args:
            upcoming: The round's seconds as a function of each worker's load.
            present: Which workers take part, booleans of shape (..., n); by default all.

        Returns:
            The shares with which all end together, and their costs.
        """
        batch = self.cluster.global_batch
        here = np.ones(self.cluster.shape, bool) if present is None else present
        least, most = bounds(self.cluster, here)
        loads = water_level(upcoming, batch, least * batch, most * batch).loads
        return Plan(loads / batch, costs=upcoming if here.all() else Only(upcoming, here))
