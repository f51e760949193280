"""The handles of ranks that step by themselves and merge their parameters at intervals (local SGD).

pace = paceline.torch.LocalSGD(model, global_batch=256, every="2 s")    # the plain module, not DDP
loader = pace.loader(dataset, seed=0)
for epoch in range(epochs):
    for x, y in loader:
        pace.backward(criterion(model(x), y))
        pace.step(optimizer)                     # this rank's own step; the last one of an interval merges
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from paceline.policies import Policy
from paceline.rounds import Cluster
from paceline.torch import local, peers
from paceline.torch.balanced import Balanced, Drawing, Membership
from paceline.torch.callbacks import Callback
from paceline.torch.gradients.reducers import Reducer
from paceline.torch.liveness.monitor import Alone, monitor
from paceline.torch.liveness.stall import Reaction, Stall
from paceline.torch.local import Merge
from paceline.torch.local_steps import LocalSteps
from paceline.torch.members import Members, Ranks
from paceline.torch.options import LOCAL, Limits, Options


class Local(Balanced):
    """The part of a handle whose ranks step by themselves."""

    @property
    def merged(self) -> bool:
        """Whether the newest ``pace.step`` was this rank's last of an interval, so that the parameters are the same
        on all ranks: evaluate, write checkpoints and step schedulers there. With ``Merge(delay=1)`` that is so at the
        end of an epoch, and after ``pace.flush()``."""
        steps = self._loop.steps
        return isinstance(steps, LocalSteps) and steps.merged

    def flush(self) -> None:
        """Merge the changes that are on their way (``Merge(delay=1)``), after a loop that is left within an epoch.
        Call it between two intervals, on all ranks."""
        self._loop.flush()


class LocalSGD(Local, Drawing):
    """Balances ranks each of which steps by itself, on about global_batch / n samples.

    At intervals ``pace.step`` merges the ranks' parameters. This trains a different model from that of one process,
    and is for slow networks. See docs/local.md.

    Args:
        model: The plain module, without DistributedDataParallel.
        global_batch: Samples of a step on every rank, over all ranks together (B).
        policy: As for ``Pace``.
        limits: As for ``Pace``; samples of an interval.
        quantum: As for ``Pace``.
        callbacks: As for ``Pace``.
        stall: As for ``Pace``.
        every: The distance of two merges: steps, seconds, or "auto". A whole number of steps, k, is k global_batch
            samples on all ranks together, however they are divided; seconds are "2 s" or a float; "auto" (default)
            merges as often as takes the link at most 10 % of the time. A new value that training finds holds from the
            next interval on.
        merge: The weight of each rank's change, and how changes are applied. A merge leaves the state of a rank's own
            optimizer unchanged.

    Construct and use it with the same arguments on all ranks; a PacelineError names a rank that differs.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        global_batch: int,
        policy: str | Callable[[Cluster], Policy[Any]] = "auto",
        *,
        every: int | float | str = "auto",
        merge: Merge = Merge(),  # noqa: B008  # it is frozen
        limits: Limits | None = None,
        quantum: int = 1,
        callbacks: Sequence[Callback] = (),
        stall: Reaction = "warn",
    ) -> None:
        given = Options(
            global_batch,
            policy,
            every=every,
            merge=merge,
            limits=limits,
            quantum=quantum,
            callbacks=callbacks,
            loop=LOCAL,
        )
        local.check(given)
        reaction = Stall.of(stall)
        super().__init__(
            model,
            given,
            lambda: Ranks(Reducer(), Members(), local.Merging(model, peers.ranks())),
            lambda: monitor(reaction),
        )


class ElasticLocalSGD(Local, Membership):
    """Balances ranks that step by themselves, and that may be lost, leave and join.

    The script is started by ``python -m paceline.torch.launcher``, and calls ``pace.register(optimizer, ...)`` before
    the loop. A killed rank loses its steps since the last merge, and the others run its samples.

    Args:
        model: As for ``LocalSGD``.
        global_batch: As for ``LocalSGD``.
        policy: As for ``LocalSGD``.
        every: As for ``LocalSGD``.
        merge: As for ``LocalSGD``, without ``send`` and ``delay``.
        limits: As for ``LocalSGD``.
        quantum: As for ``LocalSGD``.
        callbacks: As for ``LocalSGD``.

    Construct and use it with the same arguments on all ranks; a PacelineError names a rank that differs.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        global_batch: int,
        policy: str | Callable[[Cluster], Policy[Any]] = "auto",
        *,
        every: int | float | str = "auto",
        merge: Merge = Merge(),  # noqa: B008  # it is frozen
        limits: Limits | None = None,
        quantum: int = 1,
        callbacks: Sequence[Callback] = (),
    ) -> None:
        given = Options(
            global_batch,
            policy,
            every=every,
            merge=merge,
            limits=limits,
            quantum=quantum,
            callbacks=callbacks,
            loop=LOCAL,
            elastic=True,
        )
        local.check(given)
        super().__init__(model, given, lambda: self._elastic(model, given), Alone)
