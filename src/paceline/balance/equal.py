"""``equal``: every worker the same, whatever it needs for it. What plain data parallelism does."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import numpy as np

from paceline.balance.members import among_present, even
from paceline.balance.protocol import Policy
from paceline.rounds import Array, Cluster, Plan, Round


class EqualState(NamedTuple):
    shares: Array  # everybody's when all are present, (..., n)


@dataclass(frozen=True)
class Equal(Policy[EqualState]):
    """Every present worker gets the same share, within its limits (DOLBIE, baseline EQU)."""

    cluster: Cluster
    follows: ClassVar[bool] = False
    settles: ClassVar[bool] = False

    def init(self) -> tuple[Plan, EqualState]:
        shares = even(self.cluster)
        return Plan(shares), EqualState(shares)

    def step(self, state: EqualState, round: Round) -> tuple[Plan, EqualState]:
        if round.present.all():
            return Plan(state.shares), state
        return Plan(among_present(self.cluster, round.present, np.ones(self.cluster.shape))), state
