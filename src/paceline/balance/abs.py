"""``abs``: adaptive batch size, set every few rounds by each worker's mean latency (a baseline of DOLBIE)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from paceline.balance.members import among_present, carried, even
from paceline.balance.protocol import Policy
from paceline.errors import choice, whole
from paceline.rounds import Array, Cluster, Plan, Round


class AbsState(NamedTuple):
    shares: Array  # (..., n)
    seconds: Array  # sum over the rounds of the window in which the worker had load, (..., n)
    loads: Array  # samples in the window, (..., n)
    reports: Array  # number of rounds in these sums, (..., n)
    age: NDArray[np.int64]  # rounds in the window, ()


@dataclass(frozen=True)
class Abs(Policy[AbsState]):
    """Adaptive batch size: every few rounds, shares by the mean latency of those before (DOLBIE, baseline ABS).

    Args:
        cluster: The workers and their limits.
        window: P, rounds between changes.
        reading: What "inversely proportional to the historical local cost" means. "inverse" takes it literally, share
            1/T: without communication it alternates between equal shares and shares by speed, which are the paper's
            radical fluctuations. "share" divides a worker's samples by the time that they took, and settles.
    """

    cluster: Cluster
    window: int = 5
    reading: Literal["inverse", "share"] = "inverse"
    settles: ClassVar[bool] = False

    def __post_init__(self) -> None:
        whole("policy 'abs': window", self.window)
        choice("policy 'abs': reading", self.reading, "inverse", "share")

    def init(self) -> tuple[Plan, AbsState]:
        shares = even(self.cluster)
        nothing = np.zeros_like(shares)
        return Plan(shares), AbsState(shares, nothing, nothing, nothing, np.asarray(0))

    def step(self, state: AbsState, round: Round) -> tuple[Plan, AbsState]:
        ran = (round.loads > 0) & round.fresh
        seconds = state.seconds + np.where(ran, round.seconds, 0.0)
        loads = state.loads + np.where(ran, round.loads, 0.0)
        reports = state.reports + ran
        age = state.age + 1
        shares = state.shares
        if age >= self.window:
            shares = among_present(self.cluster, np.ones_like(ran), self._weights(seconds, loads, reports))
            seconds, loads, reports = (np.zeros_like(shares) for _ in range(3))
            age = np.zeros_like(age)
        after = AbsState(shares, seconds, loads, reports, age)
        return Plan(carried(self.cluster, round.present, shares)), after

    def _weights(self, seconds: Array, loads: Array, reports: Array) -> Array:
        """New shares before limits; a worker that ran nothing counts as much as the slowest of the others."""
        done = loads if self.reading == "share" else reports
        measured = (reports > 0) & (seconds > 0)
        weights = np.where(measured, done, 1.0) / np.where(measured, seconds, 1.0)
        slowest = np.where(measured, weights, np.inf).min(-1, keepdims=True)
        return np.where(measured, weights, np.where(np.isfinite(slowest), slowest, 1.0))
