"""What FSDP2 (``torch.distributed.fsdp.fully_shard``) needs: its modules, and how long a rank waits in it.

Every layer gathers its parameters in the forward and the backward pass, and reduces its gradients on the way, so a
quick rank waits for a slow one in each of them. On the CPU these collectives block; timed one by one, they are what
has to be taken out of a rank's own seconds.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from paceline.errors import PacelineError

# their names in newer and in older releases
_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def shards(modules: Iterable[torch.nn.Module]) -> list[Any]:
    """Those of the modules that were given to ``fully_shard``."""
    try:
        from torch.distributed.fsdp import FSDPModule
    except ImportError:  # torch before 2.6 has it elsewhere, without what time_waits needs
        return []
    return [module for module in modules if isinstance(module, FSDPModule)]


def check(model: torch.nn.Module, ranks: int) -> None:
    """Raise PacelineError unless every parameter is sharded over all ranks, on the CPU."""
    for name, parameter in model.named_parameters():
        mesh = getattr(parameter, "device_mesh", None)
        if mesh is None or mesh.ndim != 1 or mesh.size() != ranks:
            how = (
                "is not sharded" if mesh is None else f"is laid out over a mesh of shape {tuple(mesh.shape)}"
            )
            raise PacelineError(
                f"parameter {name} {how}; expected fully_shard over one dimension of all {ranks} ranks: "
                "give the root module to fully_shard, and mix it with no other parallelism"
            )
        if parameter.device.type != "cpu":
            raise PacelineError(
                f"fully_shard on {parameter.device.type}: there a rank's own seconds cannot be told from its waits "
                "in each layer; use DistributedDataParallel"
            )


def time_waits(sharded: Sequence[Any]) -> Callable[[], float]:
    """Time the collectives of these modules from now on; returns what tells the seconds so far."""
    watch = _Waits()
    for module in sharded:
        if not (hasattr(module, "set_custom_all_gather") and hasattr(module, "set_custom_reduce_scatter")):
            raise PacelineError(
                f"torch {torch.__version__} cannot say how long a rank waits in fully_shard; expected 2.9 or newer"
            )
        module.set_custom_all_gather(_AllGather(watch))
        module.set_custom_reduce_scatter(_ReduceScatter(watch))
    return lambda: watch.seconds


class _Waits:
    seconds = 0.0


class _Collective:
    """Blocking, and timed. What FSDP2 asks of a collective is ``allocate`` and the call."""

    def __init__(self, watch: _Waits) -> None:
        self._watch = watch

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)


class _AllGather(_Collective):
    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: Any, async_op: bool = False
    ) -> None:
        began = time.perf_counter()
        _gather(output_tensor, input_tensor, group=group)
        self._watch.seconds += time.perf_counter() - began


class _ReduceScatter(_Collective):
    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: Any,
        op: Any,
        async_op: bool = False,
    ) -> None:
        began = time.perf_counter()
        _scatter(output_tensor, input_tensor, op=op, group=group)
        self._watch.seconds += time.perf_counter() - began
