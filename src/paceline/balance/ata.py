"""``ata``: adaptive task allocation, a bandit with lower confidence bounds (Maranjyan, Saad, Richtarik and Orabona,
ICML 2025, arXiv 2502.00775).

The paper gives the problem (n workers of unknown mean seconds mu_i per task; each round, whole a_i that sum to B,
and regret in max_i a_i mu_i), the rule (minimize max_i a_i s_i, where s_i is a lower confidence bound of mu_i, so
that a worker with few observations is tried), and the result that its regret grows as the logarithm of the rounds.
The confidence term is derived here, as the paper's constants were not available. If the centered seconds have moments
of at most q! / 2 alpha^q (they are sub-exponential of scale alpha; an exponential variable has alpha = mu),
Bernstein's inequality says that the mean of K independent ones is off by more than alpha r, r = sqrt(2 L / K) +
L / K, with probability 2 exp(-L) at most. In round k, L = ln(2 k^2) makes this 1 / k^2. If alpha is given, s =
max(0, mean - alpha r). If only eta = alpha / mu is, mean <= mu (1 + eta r) gives s = mean / (1 + eta r), which needs
no unit (in place of the paper's empirical variant). A worker's round counts as one observation, since the same causes
slow down all its samples. If all workers run in every round, their radii are equal, and eta changes nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from paceline.balance.members import bounds, even
from paceline.balance.protocol import Policy
from paceline.costs import QUICKEST, Linear
from paceline.errors import number
from paceline.forecast.portable_math import log
from paceline.rounds import Array, Cluster, Plan, Round
from paceline.shares import water_level


class AtaState(NamedTuple):
    seconds: Array  # seconds per sample, summed over the rounds in which a worker ran, (..., n)
    observed: Array  # the number of these rounds, K, (..., n)
    rounds: NDArray[np.int64]  # k, ()


@dataclass(frozen=True)
class Ata(Policy[AtaState]):
    """Adaptive task allocation: a bandit that divides by lower confidence bounds of seconds per sample.

    It ignores overhead and never forgets: a baseline for workers that do not change.

    Args:
        cluster: The workers and their limits.
        alpha: Sub-exponential scale of a worker's seconds per sample, in seconds; 0 takes eta times its mean.
        eta: That scale over the mean; 1 for exponential seconds.
    """

    cluster: Cluster
    alpha: float = 0.0
    eta: float = 0.3

    def __post_init__(self) -> None:
        number("policy 'ata': alpha", self.alpha, "seconds, 0 or more", lambda alpha: 0 <= alpha < np.inf)
        number("policy 'ata': eta", self.eta, "a ratio, 0 or more", lambda eta: 0 <= eta < np.inf)

    def init(self) -> tuple[Plan, AtaState]:
        nothing = np.zeros(self.cluster.shape)
        return Plan(even(self.cluster)), AtaState(nothing, nothing, np.asarray(0))

    def step(self, state: AtaState, round: Round) -> tuple[Plan, AtaState]:
        ran = round.present & (round.loads > 0) & round.fresh
        pace = np.divide(round.seconds, round.loads, out=np.zeros(self.cluster.shape), where=ran)
        state = AtaState(state.seconds + pace, state.observed + ran, state.rounds + 1)
        # As long as some workers are unknown, they divide the batch equally among themselves.
        bound = np.maximum(self.lower_bound(state), QUICKEST)
        least, most = bounds(self.cluster, round.present)
        batch = self.cluster.global_batch
        loads = water_level(Linear(bound, np.zeros_like(bound)), batch, least * batch, most * batch).loads
        costs = Linear(np.where(round.present, bound, np.inf), np.zeros_like(bound))
        return Plan(loads / batch, costs=costs), state

    def lower_bound(self, state: AtaState) -> Array:
        """Lower confidence bounds of each worker's mean seconds per sample.

        Args:
            state: As ``step`` returned it.

        Returns:
            Seconds per sample, shape (..., n); 0 if nothing is known.
        """
        known = np.maximum(state.observed, 1.0)
        level = log(np.asarray(2.0 * float(state.rounds) ** 2))
        radius, mean = np.sqrt(2.0 * level / known) + level / known, state.seconds / known
        if self.alpha:
            return np.maximum(mean - self.alpha * radius, 0.0)
        return mean / (1.0 + self.eta * radius)
