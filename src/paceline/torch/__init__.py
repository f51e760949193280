"""Balanced data-parallel training with torch: the handle for your own loop, and a clean start and end."""

from paceline.commands import installation
from paceline.errors import PacelineError

try:
    import torch as _torch  # noqa: F401
except ModuleNotFoundError as error:  # pragma: no cover - where the extra is not installed
    raise PacelineError(f"PyTorch is not installed; {installation('torch')}") from error

from paceline.rounds import RoundResult
from paceline.torch.elastic.member import Mended
from paceline.torch.elastic_pace import ElasticPace
from paceline.torch.liveness.shutdown import join, leave
from paceline.torch.liveness.stall import Stall
from paceline.torch.local import Merge
from paceline.torch.local_sgd import ElasticLocalSGD, LocalSGD
from paceline.torch.pace import Pace

__all__ = [
    "ElasticLocalSGD",
    "ElasticPace",
    "LocalSGD",
    "Mended",
    "Merge",
    "Pace",
    "RoundResult",
    "Stall",
    "join",
    "leave",
]
