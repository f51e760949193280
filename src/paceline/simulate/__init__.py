"""A virtual cluster: what every policy would cost, thousands of rounds a second, without any machine."""

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
