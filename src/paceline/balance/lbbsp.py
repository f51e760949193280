"""``lbbsp``: LB-BSP's rule of small steps, as DOLBIE describes it: every few rounds a few samples move."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from paceline.balance.members import bounds, carried, even, remembered, slowest
from paceline.balance.protocol import Policy
from paceline.errors import choice, number, whole
from paceline.rounds import Array, Cluster, Plan, Round

SAME = 1e-9  # relative difference of seconds up to which they count as equal, because of rounding


class LbbspState(NamedTuple):
    shares: Array  # (..., n)
    streak: NDArray[np.int64]  # rounds in a row that the condition held, (..., 1)
    fastest: NDArray[np.int64]  # the fastest worker of the last round, (..., 1); -1 before the first


@dataclass(frozen=True)
class Lbbsp(Policy[LbbspState]):
    """LB-BSP by steps: a worker that keeps preceding the straggler takes over samples (DOLBIE, baseline LB-BSP).

    Args:
        cluster: The workers and their limits.
        delta: Samples that move.
        rounds: D, consecutive rounds before a move; the count starts again after one.
        reading: "loose" counts rounds in which some worker precedes the straggler; "strict" requires the same worker
            each time, so that equally fast workers keep resetting the count.
    """

    cluster: Cluster
    delta: float = 5.0
    rounds: int = 5
    reading: Literal["loose", "strict"] = "loose"

    def __post_init__(self) -> None:
        number("policy 'lbbsp': delta", self.delta, "a positive number of samples", lambda delta: delta > 0)
        whole("policy 'lbbsp': rounds", self.rounds)
        choice("policy 'lbbsp': reading", self.reading, "loose", "strict")

    def init(self) -> tuple[Plan, LbbspState]:
        shares = even(self.cluster)
        zero = np.zeros((*self.cluster.realizations, 1), np.int64)
        return Plan(shares), LbbspState(shares, zero, zero - 1)

    def step(self, state: LbbspState, round: Round) -> tuple[Plan, LbbspState]:
        present = round.present
        shares = np.array(carried(self.cluster, present, state.shares))
        least, most = (np.broadcast_to(b, shares.shape) for b in bounds(self.cluster, present))

        reported = present & np.isfinite(round.seconds)
        straggler = slowest(np.where(reported, round.seconds, -np.inf))
        fastest = slowest(np.where(reported, -round.seconds, -np.inf))
        precedes = _of(round.seconds, fastest) < (1 - SAME) * _of(round.seconds, straggler)
        if self.reading == "strict":
            state = state._replace(streak=np.where(fastest == state.fastest, state.streak, 0))
        streak = np.where(precedes, state.streak + 1, 0)

        due = streak >= self.rounds
        spare = _of(shares, straggler) - _of(least, straggler)
        room = np.minimum(spare, _of(most, fastest) - _of(shares, fastest))
        moved = np.where(due, np.minimum(self.delta / self.cluster.global_batch, np.maximum(room, 0.0)), 0.0)
        np.put_along_axis(shares, straggler, _of(shares, straggler) - moved, -1)
        np.put_along_axis(shares, fastest, _of(shares, fastest) + moved, -1)
        kept = remembered(present, shares, state.shares)
        return Plan(shares), LbbspState(kept, np.where(due, 0, streak), fastest)


def _of(values: Array, worker: NDArray[np.int64]) -> Array:
    return np.take_along_axis(values, worker, -1)
