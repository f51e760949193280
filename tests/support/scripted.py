"""A policy that plays a given list of divisions, to test engines with splits of every kind."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import numpy as np

from paceline.rounds import Cluster, Plan, Round


class ScriptedState(NamedTuple):
    step: np.ndarray


@dataclass(frozen=True)
class Scripted:
    """Plays ``weights[t % T]`` in round t, as shares."""

    cluster: Cluster
    weights: tuple[tuple[float, ...], ...] = ((1.0,),)
    needs_upcoming: ClassVar[bool] = False

    def _plan(self, step: int) -> Plan:
        weights = np.array(self.weights[step % len(self.weights)], float)[: self.cluster.workers]
        return Plan(weights / weights.sum())

    def init(self) -> tuple[Plan, ScriptedState]:
        return self._plan(0), ScriptedState(np.array(0))

    def step(self, state: ScriptedState, round: Round) -> tuple[Plan, ScriptedState]:
        step = int(state.step) + 1
        return self._plan(step), ScriptedState(np.array(step))


@dataclass(frozen=True)
class Script:
    """A factory for Pace: ``Pace(..., policy=Script(weights))``."""

    weights: tuple[tuple[float, ...], ...]

    def __call__(self, cluster: Cluster) -> Scripted:
        return Scripted(cluster, self.weights)
