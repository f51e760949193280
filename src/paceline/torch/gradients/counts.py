"""Losses that are means over something other than samples: tokens, nodes of a graph, pixels that count.

Their gradient is the sum over all that is counted, over its number in the whole round. That number is known to nobody
before the last piece of the round is drawn: until then the number of samples stands for it, and the gradients are put
right at the round's end (LB-BSP's weighted aggregation, with tokens for samples).
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist

from paceline.errors import PacelineError
from paceline.torch import peers


def number(count: Any) -> float:
    """A count as the user gave it, a number or a tensor with one. Raises PacelineError for what is none."""
    try:
        value = float(count)
    except (TypeError, ValueError, RuntimeError):
        value = math.nan
    if not (math.isfinite(value) and value >= 0):
        raise PacelineError(
            f"count={count!r}: expected what the loss is a mean over, a number that is at least 0"
        )
    return value


class Counts:
    """What is counted in one round, over its pieces and all ranks."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.begin()

    def begin(self) -> None:
        """A round begins."""
        self._own = 0.0
        self._given: bool | None = None  # whether the round's pieces come with a count
        self._total: torch.Tensor | None = None
        self._work: Any = None

    def add(self, step: int, count: float | None, last: bool) -> None:
        """A piece's backward pass begins, the last of the round where ``last``. Collective there, without a wait."""
        given = count is not None
        if self._given not in (None, given):
            raise PacelineError(
                f"round {step}: one piece was given a count and another was not; expected count= with each or none"
            )
        self._given = given
        self._own += count or 0.0
        if given and last:
            self._total = torch.tensor([self._own], dtype=torch.float64, device=self._device)
            if peers.ranks() > 1:
                self._work = dist.all_reduce(self._total, async_op=True)

    def factor(self, batch: int) -> float | None:
        """By what the round's gradients are to be multiplied; None where samples are what is counted. Collective."""
        if self._total is None:
            return None
        if self._work is not None:
            self._work.wait()
        total = float(self._total)
        self.begin()
        return batch / total if total else 0.0
