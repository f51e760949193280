"""Paceline: training at the pace of the whole cluster instead of the pace of its slowest worker."""

from typing import TYPE_CHECKING, Any

from paceline.errors import PacelineError, WorkerError

if TYPE_CHECKING:
    from paceline.rounds import Cluster, Machines, Plan, Round

__version__ = "0.1.0"
__all__ = ["Cluster", "Machines", "PacelineError", "Plan", "Round", "WorkerError", "__version__"]


def __getattr__(name: str) -> Any:
    """Import what needs numpy only when it is used: ``paceline.client`` runs without numpy."""
    if name in __all__:
        from paceline import rounds

        return getattr(rounds, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
