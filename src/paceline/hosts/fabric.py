"""Balanced batches in a Lightning Fabric loop.

    fabric.launch()
    model, optimizer = fabric.setup(model, optimizer)
    pace = FabricPace(fabric, model, global_batch=256)         # 1
    loader = pace.loader(dataset, seed=0)                    # 2, instead of DataLoader and setup_dataloaders
    for epoch in range(epochs):
        for x, y in loader:
            pace.backward(criterion(model(x), y))            # 3, instead of fabric.backward
            fabric.clip_gradients(model, optimizer, max_norm=1.0)
            pace.step(optimizer)                             # 4, steps and zeroes
    pace.close()                                             # 5, ends without gloo's abort at exit

``fabric.save(path, {"model": model, "optimizer": optimizer, "pace": pace})`` and ``fabric.load`` include its state.
Each micro-step is an optimizer step, on every rank; ``accumulate=k`` is for loops that take k micro-steps for each
step. Batches are put on Fabric's device.
"""

from __future__ import annotations

from typing import Any

import torch

from paceline.commands import installation
from paceline.errors import PacelineError
from paceline.hosts.accumulating import AccumulatingPace, Placing

try:
    from lightning.fabric import Fabric
    from lightning.fabric.wrappers import _FabricModule
except ModuleNotFoundError as error:  # pragma: no cover - if the extra is not installed
    raise PacelineError(f"Lightning is not installed; {installation('hosts')}") from error

__all__ = ["FabricPace"]

# Strategies that are known to average gradients over the ranks.
AVERAGES = ("SingleDeviceStrategy", "DDPStrategy", "ModelParallelStrategy")


class FabricPace(AccumulatingPace):
    """``paceline.torch.Pace`` for a model that ``fabric.setup`` wrapped.

    Args:
        fabric: The launched Fabric.
        model: As ``fabric.setup`` returned it.
        global_batch: B, samples per optimizer step over all ranks, including all its k micro-steps.
        policy: As for ``paceline.torch.Pace``.
        options: As for ``paceline.torch.Pace``, and ``accumulate``: k, micro-steps per step of a loop that
            accumulates by itself (``loss / k``, ``fabric.no_backward_sync``).

    Raises:
        PacelineError: For a model that ``fabric.setup`` did not return, and a strategy that is not known to average
            gradients.
    """

    def __init__(
        self, fabric: Fabric, model: torch.nn.Module, global_batch: int, policy: Any = "auto", **options: Any
    ) -> None:
        if not isinstance(model, _FabricModule):
            raise PacelineError(
                f"FabricPace was given a {type(model).__name__}; expected what fabric.setup(model, optimizer) "
                "returned"
            )
        check_strategy(fabric.strategy)
        self._fabric, self._module = fabric, model
        super().__init__(model, global_batch, policy, **options)
        self.host.adapter = Placing(fabric.to_device)

    def backward(
        self, loss: torch.Tensor, reduction: str = "mean", scaler: Any = None, count: Any = None
    ) -> None:
        if scaler is not None:
            raise PacelineError(
                "scaler= was given, but Fabric scales by itself: set its precision and leave scaler out"
            )
        self._fabric.backward(self.weighted(loss, reduction, count), model=self._module)
        self.host.backward_done()


def check_strategy(strategy: Any) -> None:
    """Raise PacelineError unless this strategy of Lightning is known to average gradients over all ranks."""
    name = type(strategy).__name__
    if name not in AVERAGES:
        raise PacelineError(
            f"strategy {name} does not leave the plain mean of the ranks' gradients; expected strategy='ddp', or "
            "fully_shard through ModelParallelStrategy"
        )
