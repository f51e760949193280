"""Loops that accumulate by themselves: k micro-steps a step, each loss divided by k, as their authors wrote them.

The mean over such a window is what one step is to take, so ``loss / k`` must not divide once more: it is multiplied
by k before it is weighed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from paceline.errors import PacelineError, whole
from paceline.torch.host import Host
from paceline.torch.pace import Pace


class Windows(Pace):
    """``paceline.torch.Pace`` with one option more.

    accumulate: k, micro-steps that the loop itself takes for each optimizer step, on every rank. It divides its loss
        by k and steps in the last of them: ``if (i + 1) % k == 0: optimizer.step()``. All k hold ``global_batch``.
    """

    def __init__(self, *given: Any, accumulate: int = 1, **options: Any) -> None:
        whole("accumulate", accumulate)
        if accumulate > 1:
            if options.get("loop", "whole") != "whole":
                raise PacelineError(
                    f"accumulate={accumulate} with loop={options['loop']!r}, which accumulates as the policy plans; "
                    "leave one of them out"
                )
            options["micro_steps"] = accumulate
        super().__init__(*given, **options)
        self._divides = accumulate  # the loop, its loss

    def backward(
        self, loss: torch.Tensor, reduction: str = "mean", scaler: Any = None, count: Any = None
    ) -> None:
        super().backward(loss * self._divides, reduction, scaler, count)

    def weighted(self, loss: torch.Tensor, reduction: str = "mean", count: Any = None) -> torch.Tensor:
        return super().weighted(loss * self._divides, reduction, count)


class Placing(Host):
    """A host that only puts batches on its device."""

    def __init__(self, to_device: Callable[[Any], Any]) -> None:
        self._to_device = to_device

    def place(self, batch: Any) -> Any:
        return self._to_device(batch)
