"""``asp``: every gradient moves the parameters when it arrives; no worker waits, and all gradients are stale."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, Literal

from paceline.sync.lsp import Lsp


@dataclass(frozen=True)
class Asp(Lsp):
    """Every gradient is applied on arrival, a sample counting as much as under BSP (LB-BSP, baseline ASP).

    Args:
        workers: Number of workers, n.
        mode: "push-wait".
        stale: "full" or "inverse", which scales a gradient of staleness d - 1 by 1 / d (LB-BSP, baseline DynSSP).
    """

    group: int = field(default=1, init=False)
    barrier: int = field(default=0, init=False)
    scale: Literal["batch", "mean"] = field(default="batch", init=False)
    takes_quorum: ClassVar[bool] = False
