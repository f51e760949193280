"""Balanced batches in a Ray Train worker loop.

    def train_loop_per_worker(config):
        model = ray.train.torch.prepare_model(Net())
        pace = RayTrainPace(model, global_batch=256)           # 1
        loader = pace.loader(dataset, seed=0)              # 2, instead of DataLoader and prepare_data_loader
        for epoch in range(epochs):
            for x, y in loader:
                pace.backward(criterion(model(x), y))      # 3, instead of loss.backward()
                pace.step(optimizer)                       # 4, steps and zeroes
            ray.train.report({"loss": ...}, checkpoint=...)    # with pace.state_dict() beside the model's
        pace.close()                                       # 5, lets go before Ray ends the process group

``pace.load_state_dict`` restores the state in ``ray.train.get_checkpoint()``; the number of workers may differ.
"""

from __future__ import annotations

from functools import partial
from operator import methodcaller
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from paceline.commands import installation
from paceline.errors import PacelineError
from paceline.hosts.accumulating import AccumulatingPace, Placing

try:
    import ray.train.torch
except ModuleNotFoundError as error:  # pragma: no cover - if the extra is not installed
    raise PacelineError(f"Ray Train is not installed; {installation('hosts')}") from error

__all__ = ["RayTrainPace"]


class RayTrainPace(AccumulatingPace):
    """``paceline.torch.Pace`` for a model that ``ray.train.torch.prepare_model`` wrapped.

    Batches are put on the worker's device.

    Args:
        model: What ``ray.train.torch.prepare_model`` returned.
        global_batch: B, samples per optimizer step over all workers.
        options: As for ``paceline.torch.Pace``.
        named: As for ``paceline.torch.Pace``, and ``accumulate=k`` for a loop that takes k micro-steps for each step
            and divides its loss by k.

    Raises:
        PacelineError: Outside of a worker; its loader refuses the shards of Ray Data, which are split before training
            begins.
    """

    def __init__(self, model: torch.nn.Module, global_batch: int, *options: Any, **named: Any) -> None:
        if not _in_worker():
            raise PacelineError(
                "paceline.hosts.ray_train.RayTrainPace was made outside of a Ray Train worker; make it in the "
                "train_loop_per_worker that a TorchTrainer runs"
            )
        super().__init__(model, global_batch, *options, **named)
        moved = methodcaller("to", ray.train.torch.get_device(), non_blocking=True)
        self.host.adapter = Placing(partial(tree_map_only, torch.Tensor, moved))

    def close(self) -> None:
        """Detach from the model; Ray itself ends the process group."""
        self.host.detach()
        self.host.release()


def _in_worker() -> bool:
    try:
        ray.train.get_context().get_world_rank()
    except Exception:  # its type depends on the version of Ray
        return False
    return True
