"""Sharded models can be balanced from PyTorch 2.9 on; with an older one, their cases are left out."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard

# Without it nobody can tell how long a rank waits for the others in each layer.
NEEDED = "set_custom_all_gather"
BALANCED = hasattr(FSDPModule, NEEDED)


def possible(cases: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Those of the cases, by name, that the PyTorch at hand can run."""
    wanting = ("sharded", "sharding")
    return {
        name: case for name, case in cases.items() if BALANCED or not any(case.get(key) for key in wanting)
    }


def sharded(model: nn.Module, mesh: Any) -> nn.Module:
    """As ModelParallelStrategy's parallelize_fn: FSDP2 over the ranks."""
    return _sharded(model, mesh["data_parallel"])


def sharded_over(model: nn.Module, ranks: int, **options: Any) -> nn.Module:
    """FSDP2 over so many ranks. options: of ``fully_shard``."""
    return _sharded(model, init_device_mesh("cpu", (ranks,)), **options)


def _sharded(model: nn.Module, mesh: Any, **options: Any) -> nn.Module:
    for layer in model.children():
        if any(True for _ in layer.parameters()):
            fully_shard(layer, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def whole(parameter: Any) -> torch.Tensor:
    """All of a parameter, of which this rank may hold a part."""
    return getattr(parameter, "full_tensor", lambda: parameter)().detach()
