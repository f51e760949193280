"""Balanced batches inside other training frameworks: one short file a host, all built on ``paceline.torch.Pace``.

Nothing is imported before it is asked for, so that the user of one host does not need the others:

    from paceline.hosts.lightning import LightningBalancer      # Lightning's Trainer
    from paceline.hosts.fabric import FabricPace                # Lightning Fabric
    from paceline.hosts.accelerate import AcceleratePace        # Accelerate
    from paceline.hosts.transformers import BalancedTrainer     # the Hugging Face Trainer
    from paceline.hosts.ray_train import RayTrainPace           # Ray Train
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from paceline.hosts.accelerate import AcceleratePace
    from paceline.hosts.fabric import FabricPace
    from paceline.hosts.lightning import LightningBalancer
    from paceline.hosts.ray_train import RayTrainPace
    from paceline.hosts.transformers import BalancedTrainer

__all__ = ["AcceleratePace", "BalancedTrainer", "FabricPace", "LightningBalancer", "RayTrainPace"]

_HOMES = {
    "AcceleratePace": "accelerate",
    "BalancedTrainer": "transformers",
    "FabricPace": "fabric",
    "LightningBalancer": "lightning",
    "RayTrainPace": "ray_train",
}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
