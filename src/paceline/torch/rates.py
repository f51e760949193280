"""Notices a learning rate that is changed at every turn of a loop, where a round takes several turns."""

from __future__ import annotations

import warnings

import torch


class LearningRateWatch:
    """What an optimizer's learning rates were at the turn before, within a round."""

    def __init__(self) -> None:
        self._before: tuple[int, list[float]] | None = None  # after a turn that did not end that round
        self._warned = False

    def watch(self, optimizer: torch.optim.Optimizer, step: int, complete: bool) -> None:
        """A turn of round ``step`` is over, the last one where ``complete``; warns the first time."""
        rates = [rate for group in optimizer.param_groups if isinstance(rate := group["lr"], float)]
        before = self._before
        if before is not None and before[0] == step and before[1] != rates and not self._warned:
            self._warned = True
            warnings.warn(
                f"the learning rate was changed within round {step}, which takes several turns of the loop: step "
                "schedulers once a round (`if pace.step(optimizer): scheduler.step()`), or choose policy='level'",
                RuntimeWarning,
                stacklevel=3,
            )
        self._before = None if complete else (step, rates)
