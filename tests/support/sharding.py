"""Sharded models can be balanced from PyTorch 2.9 on; with an older one, their cases are left out."""

from __future__ import annotations

from typing import Any

from torch.distributed.fsdp import FSDPModule

# Without it nobody can tell how long a rank waits for the others in each layer.
NEEDED = "set_custom_all_gather"
BALANCED = hasattr(FSDPModule, NEEDED)


def possible(cases: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Those of the cases, by name, that the PyTorch at hand can run."""
    wanting = ("sharded", "sharding")
    return {
        name: case for name, case in cases.items() if BALANCED or not any(case.get(key) for key in wanting)
    }
