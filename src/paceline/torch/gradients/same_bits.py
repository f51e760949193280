"""What results of the same bits ask for beside sums without rounding: kernels that compute alike wherever they run.

MKL, below torch, adds in another order where an array does not begin at a multiple of 64 bytes, with another number
of threads, and on another processor. Torch's own tensors do begin there; a numpy array begins anywhere.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from paceline.errors import PacelineError
from paceline.torch import peers

ALIGNMENT = 64  # bytes
CPU_INFO = Path("/proc/cpuinfo")


def aligned(batch: Any) -> Any:
    """The same batch, in which every tensor on the CPU begins at a multiple of 64 bytes; others are copied."""
    if isinstance(batch, torch.Tensor):
        return batch if _begins_well(batch) else batch.clone()
    if isinstance(batch, Mapping):
        return type(batch)({key: aligned(value) for key, value in batch.items()})  # type: ignore[call-arg]
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(aligned(value) for value in batch))
    if isinstance(batch, list | tuple):
        return type(batch)(aligned(value) for value in batch)
    return batch


def check_model(model: torch.nn.Module) -> None:
    """Raises PacelineError for a parameter or buffer that begins elsewhere, and for dropout."""
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if not _begins_well(tensor):
            raise PacelineError(
                f"deterministic=True: {name} of the model does not begin at a multiple of {ALIGNMENT} bytes, where "
                f"sums may come in another order; give it memory of its own first: {name}.data = {name}.data.clone()"
            )
    for name, module in model.named_modules():
        if _drops_out(module):
            raise PacelineError(
                f"deterministic=True: {name or type(model).__name__} of the model drops out at random, and each rank "
                "draws its own numbers, so that the result depends on who runs what; set its probability to 0"
            )


def check_ranks() -> None:
    """Raises PacelineError on every rank where two of them compute in unlike ways. Collective."""
    try:
        peers.agree(
            {
                "torch.__version__": torch.__version__,
                "torch.get_num_threads()": torch.get_num_threads(),
                "ATEN_CPU_CAPABILITY": torch.backends.cpu.get_cpu_capability(),
                "MKL_CBWR": os.environ.get("MKL_CBWR", ""),
                "processor": _processor(),
            }
        )
    except PacelineError as error:
        raise PacelineError(f"deterministic=True: {error}, or results depend on who runs what") from error


def _begins_well(tensor: torch.Tensor) -> bool:
    strided = tensor.device.type == "cpu" and tensor.layout == torch.strided
    return not strided or tensor.data_ptr() % ALIGNMENT == 0


def _drops_out(module: torch.nn.Module) -> bool:
    own = getattr(module, "p", 0) if isinstance(module, torch.nn.modules.dropout._DropoutNd) else 0
    within = getattr(module, "dropout", 0)  # of attention and of recurrent layers, a number there
    return any(isinstance(part, float | int) and part > 0 for part in (own, within))


def _processor() -> str:
    """As Linux names it; empty where nothing does."""
    try:
        lines = CPU_INFO.read_text(encoding="utf-8").splitlines()
    except OSError:
        return ""
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
