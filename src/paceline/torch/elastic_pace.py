"""The handle of a run that continues when a rank is killed, freezes, leaves or joins."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from paceline.policies import Policy
from paceline.rounds import Cluster
from paceline.torch.balanced import Exact, Membership
from paceline.torch.callbacks import Callback
from paceline.torch.liveness.monitor import Alone
from paceline.torch.options import Limits, Options


class ElasticPace(Exact, Membership):
    """Balances one data-parallel model over ranks that may be lost, leave and join.

    The script is started by ``python -m paceline.torch.launcher``, and calls ``pace.register(optimizer, ...)`` before
    the loop. See docs/faults.md.

    Args:
        model: A plain module, without DistributedDataParallel.
        loop: "round" or "pieces", as for ``Pace``; a round whose rank is lost takes more pieces on the others.
        global_batch: As for ``Pace``.
        policy: As for ``Pace``.
        limits: As for ``Pace``.
        micro_batch: As for ``Pace``.
        quantum: As for ``Pace``.
        deterministic: As for ``Pace``.
        callbacks: As for ``Pace``.

    Construct and use it with the same arguments on all ranks; a PacelineError names a rank that differs.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        global_batch: int,
        policy: str | Callable[[Cluster], Policy[Any]] = "auto",
        *,
        limits: Limits | str | None = None,
        micro_batch: int | None = None,
        loop: str = "round",
        quantum: int = 1,
        deterministic: bool = False,
        callbacks: Sequence[Callback] = (),
    ) -> None:
        given = Options(
            global_batch,
            policy,
            limits=limits,
            micro_batch=micro_batch,
            loop=loop,
            quantum=quantum,
            deterministic=deterministic,
            callbacks=callbacks,
            elastic=True,
        )
        super().__init__(model, given, lambda: self._elastic(model, given), Alone)
