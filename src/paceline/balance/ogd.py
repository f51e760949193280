"""``ogd``: online gradient descent on the round's time, projected onto the simplex (a baseline of DOLBIE)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import numpy as np

from paceline.balance.members import bounds, carried, even, fill_unknown, measured_slopes, remembered, slowest
from paceline.balance.protocol import Policy
from paceline.costs import derivative
from paceline.errors import number
from paceline.rounds import Array, Cluster, Plan, Round
from paceline.shares import project


class OgdState(NamedTuple):
    shares: Array  # (..., n)
    seconds_per_sample: Array  # (..., n), as last measured; NaN before


@dataclass(frozen=True)
class Ogd(Policy[OgdState]):
    """Online gradient descent: the straggler gives up a step times its slope, and all workers share it.

    The round's time is a maximum, so that its subgradient is the derivative of the straggler's own cost, in seconds
    for the whole batch, and 0 for all others. If only seconds were measured, its cost is the line through them and
    the overhead. DOLBIE, baseline OGD.

    Args:
        cluster: The workers and their limits.
        rate: beta, the step. It depends on the unit of time; for seconds the paper has 0.001.
    """

    cluster: Cluster
    rate: float = 0.001
    settles: ClassVar[bool] = False

    def __post_init__(self) -> None:
        number("policy 'ogd': rate", self.rate, "a positive number", lambda rate: rate > 0)

    def init(self) -> tuple[Plan, OgdState]:
        shares = even(self.cluster)
        return Plan(shares), OgdState(shares, np.full_like(shares, np.nan))

    def step(self, state: OgdState, round: Round) -> tuple[Plan, OgdState]:
        present = round.present
        shares = carried(self.cluster, present, state.shares)
        slope = measured_slopes(round, state.seconds_per_sample)
        known = fill_unknown(slope) if round.costs is None else derivative(round.costs, round.loads)
        straggler = slowest(np.where(present, round.seconds, -np.inf))
        steepness = np.take_along_axis(known, straggler, -1) * round.batch
        moved, held = np.array(shares), np.take_along_axis(shares, straggler, -1)
        np.put_along_axis(moved, straggler, held - self.rate * steepness, -1)
        shares = project(moved, *bounds(self.cluster, present))
        return Plan(shares), OgdState(remembered(present, shares, state.shares), slope)
