"""Loops that accumulate by themselves: they take k micro-steps per step and divide each loss by k.

    pace = AccumulatingPace(ddp, global_batch=256, accumulate=k)

A step needs the mean over such a window, which the weights already give, so the loss is multiplied by k before it is
weighted.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from paceline.errors import PacelineError, whole
from paceline.torch.balanced import Hosted
from paceline.torch.gradients.weighing import GLOBAL
from paceline.torch.host import Host
from paceline.torch.pace import Pace

__all__ = ["AccumulatingPace"]


class HostedPace(Pace, Hosted):
    """``paceline.torch.Pace`` for an adapter, with two more options: see ``Hosted``."""

    def __init__(
        self, *given: Any, micro_steps: int | None = None, fill: bool | None = None, **options: Any
    ) -> None:
        self._micro_steps, self._fill = micro_steps, fill
        super().__init__(*given, **options)


class AccumulatingPace(HostedPace):
    """``paceline.torch.Pace`` with one more option.

    Args:
        given: As for ``paceline.torch.Pace``.
        accumulate: k, micro-steps that the loop itself takes for each optimizer step, on every rank. It divides its
            loss by k and steps in the last one: ``if (i + 1) % k == 0: optimizer.step()``. All k are one
            ``global_batch``.
        options: As for ``paceline.torch.Pace``.
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
        self._divides = accumulate  # the loop divides its loss by it

    def backward(
        self, loss: torch.Tensor, reduction: str = "mean", scaler: Any = None, count: Any = None
    ) -> None:
        super().backward(self._whole(loss, reduction), reduction, scaler, count)

    def weighted(self, loss: torch.Tensor, reduction: str = "mean", count: Any = None) -> torch.Tensor:
        return super().weighted(self._whole(loss, reduction), reduction, count)

    def _whole(self, loss: torch.Tensor, reduction: str) -> torch.Tensor:
        """The loss as it was before the loop divided it; one over all ranks keeps the weight that the loop gives."""
        return loss if reduction == GLOBAL else loss * self._divides


class Placing(Host):
    """A host that only puts batches on its device."""

    def __init__(self, to_device: Callable[[Any], Any]) -> None:
        self._to_device = to_device

    def place(self, batch: Any) -> Any:
        return self._to_device(batch)
