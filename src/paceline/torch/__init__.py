"""Balanced data-parallel training with torch: the handle for a loop of one's own, and a clean start and end."""

from paceline.errors import PacelineError

try:
    import torch as _torch  # noqa: F401
except ModuleNotFoundError as error:  # pragma: no cover - where the extra is not installed
    raise PacelineError("PyTorch is not installed; install paceline[torch]") from error

from paceline.torch.ledger import RoundResult
from paceline.torch.pace import Pace
from paceline.torch.recorder import Recorder
from paceline.torch.shutdown import join, leave

__all__ = ["Pace", "Recorder", "RoundResult", "join", "leave"]
