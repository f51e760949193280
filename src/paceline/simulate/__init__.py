"""A virtual cluster: the time that every policy would take, thousands of rounds per second, without real machines."""

from paceline.simulate.rounds import Outcome, Played, run
from paceline.simulate.scenario import Event, Link, Scenario, WorkerClass, from_trace
from paceline.simulate.toml import of_trace, read

__all__ = [
    "Event",
    "Link",
    "Outcome",
    "Played",
    "Scenario",
    "WorkerClass",
    "from_trace",
    "of_trace",
    "read",
    "run",
]
