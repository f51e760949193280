"""The protocol that every policy follows, and what it may say of itself."""

from __future__ import annotations

from typing import Any, ClassVar, Protocol, TypeVar

from paceline import forecast
from paceline.forecast import AnyForecast
from paceline.rounds import Cluster, Plan, Round

S = TypeVar("S")


class Policy(Protocol[S]):
    """Decides how much each worker does. Frozen: what changes lives in the state: an array, or a tuple of them.

    A class that inherits from it says of itself only what differs from what stands here; one that does not inherit
    is completed where it is used (``complete``).
    """

    cluster: Cluster
    needs_upcoming: ClassVar[bool] = False  # reads Round.upcoming: a simulation's oracle, never a real run
    needs_machines: ClassVar[bool] = False  # has a use for Cluster.machines
    needs_noise: ClassVar[bool] = False  # reads Round.gradients, and may then plan a quorum
    follows: ClassVar[bool] = True  # plans by what was measured
    settles: ClassVar[bool] = True  # shares with which all end together are where it stays

    @property
    def needs_readings(self) -> bool:
        """Whether it reads Round.cpu and memory."""
        return False

    @property
    def trains(self) -> bool:
        """Whether it takes its time over a model, and is to be stepped beside the training."""
        return False

    def init(self) -> tuple[Plan, S]:
        """The first round's plan, and the state to hand to ``step``."""
        ...

    def step(self, state: S, round: Round) -> tuple[Plan, S]:
        """The next round's plan. Neither argument is changed."""
        ...


SAID = ("needs_upcoming", "needs_machines", "needs_noise", "settles", "needs_readings", "trains")


def complete(policy: Policy[Any]) -> None:
    """Give the class of a policy that does not inherit from ``Policy`` what it leaves unsaid, as it stands there."""
    for name in SAID:
        if not hasattr(policy, name):
            setattr(type(policy), name, vars(Policy)[name])


class Forecasting:
    """A policy that plans by a forecast, and says of itself what the forecast says.

    forecast: its name, with its options after a colon and ";" between them.
    """

    forecast: str

    @property
    def needs_readings(self) -> bool:
        """Whether the forecast reads Round.cpu and memory."""
        return self.forecaster().needs_readings

    @property
    def trains(self) -> bool:
        """Whether the forecast fits a model, which engines do aside."""
        return self.forecaster().trains

    def forecaster(self) -> AnyForecast:
        """The forecast. Raises PacelineError for an unknown one."""
        return forecast.create(self.forecast)
