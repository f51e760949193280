"""``equal``: every worker gets the same load, however long it takes, as in plain data parallelism."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from paceline.balance.members import among_present, even
from paceline.balance.protocol import Policy
from paceline.rounds import Array, Cluster, Plan, Round


@dataclass(frozen=True)
class Equal(Policy[Array]):
    """Every present worker gets the same share, within its limits (DOLBIE, baseline EQU).

    Its state is each worker's share when all are present, shape (..., n).

    Args:
        cluster: The workers and their limits.
    """

    cluster: Cluster
    settles: ClassVar[bool] = False

    def init(self) -> tuple[Plan, Array]:
        shares = even(self.cluster)
        return Plan(shares), shares

    def step(self, state: Array, round: Round) -> tuple[Plan, Array]:
        if round.present.all():
            return Plan(state), state
        return Plan(among_present(self.cluster, round.present, np.ones(self.cluster.shape))), state
