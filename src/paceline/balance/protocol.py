"""The protocol that every policy follows, and the properties that a policy may declare."""

from __future__ import annotations

from typing import Any, ClassVar, Protocol, TypeVar

from paceline import forecast
from paceline.forecast import AnyForecast
from paceline.rounds import Cluster, Plan, Round

S = TypeVar("S")


class Policy(Protocol[S]):
    """Decides how much each worker does. Frozen: all that changes is in the state, an array or a tuple of arrays.

    A class that inherits from it declares only the properties that differ from these defaults; for a class that does
    not inherit, ``complete`` sets the defaults.

    Attributes:
        cluster: The workers and their limits.
        needs_upcoming: Reads ``Round.upcoming``: a simulation's oracle, never a real run.
        needs_machines: Reads ``Cluster.machines``.
        needs_noise: Reads ``Round.gradients``, and may then plan a quorum.
        settles: Keeps shares with which all workers end together. Only the contract tests read it.
    """

    cluster: Cluster
    needs_upcoming: ClassVar[bool] = False
    needs_machines: ClassVar[bool] = False
    needs_noise: ClassVar[bool] = False
    settles: ClassVar[bool] = True

    @property
    def needs_readings(self) -> bool:
        """Whether it reads Round.cpu and memory."""
        return False

    @property
    def trains(self) -> bool:
        """Whether ``train`` does something, which takes long."""
        return False

    def init(self) -> tuple[Plan, S]:
        """Begin a run.

        Returns:
            The first round's plan, and the state to pass to ``step``.
        """
        ...

    def step(self, state: S, round: Round) -> tuple[Plan, S]:
        """Plan the next round. Neither argument is changed.

        Args:
            state: As the step before returned it.
            round: What happened in the newest round.

        Returns:
            The next round's plan, and the next state.
        """
        ...

    def train(self, state: S) -> S:
        """Do the training that is due between two rounds.

        Engines call it once after each ``step``, in a background thread while the next round runs, and give its
        result to the next ``step``.

        Args:
            state: As the newest step returned it; it is not changed.

        Returns:
            The state after training.
        """
        return state


PROPERTIES = (
    "needs_upcoming",
    "needs_machines",
    "needs_noise",
    "settles",
    "needs_readings",
    "trains",
    "train",
)


def complete(policy: Policy[Any]) -> None:
    """Set what the class of a policy does not declare to the defaults of ``Policy``."""
    for name in PROPERTIES:
        if not hasattr(policy, name):
            setattr(type(policy), name, vars(Policy)[name])


class Forecasting:
    """A policy that plans by a forecast, and has the forecast's properties.

    forecast: its name, with its options after a colon and ";" between them.
    """

    forecast: str

    @property
    def needs_readings(self) -> bool:
        """Whether the forecast reads Round.cpu and memory."""
        return self.forecaster().needs_readings

    @property
    def trains(self) -> bool:
        """Whether the forecast trains a model."""
        return self.forecaster().trains

    def forecaster(self) -> AnyForecast:
        """The forecast. Raises PacelineError for an unknown one."""
        return forecast.made(self.forecast)
