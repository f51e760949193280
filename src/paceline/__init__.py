"""Paceline: training at the pace of the whole cluster instead of the pace of its slowest worker."""

from paceline.errors import PacelineError
from paceline.rounds import Cluster, Machines, Plan, Round

__version__ = "0.1.0"
__all__ = ["Cluster", "Machines", "PacelineError", "Plan", "Round", "__version__"]
