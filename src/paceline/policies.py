"""The protocol every policy follows, and the names by which people ask for one.

``create("dolbie:step=0.001", cluster)`` gives a policy; ``init`` its first plan and state; ``step`` the next
ones. A policy never sleeps, prints, sends or reads a clock: the same object runs on a virtual clock and under
real training, and replicas that see the same rounds make the same plans.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar, Protocol, TypeVar

import numpy as np

from paceline.errors import PacelineError
from paceline.rounds import Cluster, Plan, Round

S = TypeVar("S")


class Policy(Protocol[S]):
    """Decides how much each worker does. Frozen: what changes lives in the state, a NamedTuple of arrays."""

    cluster: Cluster
    needs_upcoming: ClassVar[bool]  # reads Round.upcoming: a simulation's oracle, never a real run

    def init(self) -> tuple[Plan, S]:
        """The first round's plan, and the state to hand to ``step``."""
        ...

    def step(self, state: S, round: Round) -> tuple[Plan, S]:
        """The next round's plan. Neither argument is changed."""
        ...
