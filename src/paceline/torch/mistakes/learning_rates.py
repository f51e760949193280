"""Warns about a learning rate that is changed at every micro-step of a loop although a round takes several."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from typing import Any

from paceline.torch import timing


class LearningRateWatch:
    """The learning rates of one loop's optimizers."""

    def __init__(self) -> None:
        # Of each optimizer, by its id: the round, -1 for one that is over, and the rates.
        self._before: dict[int, tuple[int, list[float]]] = {}
        self._warned = False

    def watch(self, optimizers: Iterable[Any], step: int, complete: bool) -> None:
        """A micro-step of round ``step`` is over. complete: it was the last one. Warns the first time."""
        for optimizer in optimizers:
            groups = getattr(optimizer, "param_groups", ())
            rates = [rate for group in groups if isinstance(rate := group.get("lr"), float)]
            before = self._before.get(id(optimizer), (-1, rates))
            self._before[id(optimizer)] = -1 if complete else step, rates
            if before[0] == step and before[1] != rates and not self._warned:
                self._warned = True
                warnings.warn(
                    f"the learning rate was changed within round {step}, which takes several micro-steps of the "
                    "loop: step schedulers once a round (`if pace.step(optimizer): scheduler.step()`), or choose "
                    "policy='level'",
                    RuntimeWarning,
                    stacklevel=timing.level(),
                )
