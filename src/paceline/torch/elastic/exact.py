"""Sums of the same bits whoever runs what, and whoever is lost: whole numbers, which add without rounding."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from paceline.torch.gradients.same_bits import ExactSum


class ExactBuckets:
    """As ``Buckets``: what is summed is a copy, so that nothing is lost where the sum fails. ``add`` after each
    backward pass takes the gradients from the parameters; the sum begins when the round's last one is through."""

    def __init__(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        self._parameters = list(parameters)
        self._own = ExactSum(parameters)
        self._total: torch.Tensor | None = None

    def begin(self, sum: Callable[[torch.Tensor], Any]) -> None:
        """Nothing is summed before the backward pass is through."""

    def add(self) -> None:
        """A backward pass is through."""
        self._own.add()

    def finish(self, sum: Callable[[torch.Tensor], Any]) -> list[Any]:
        """Start the sum. What to wait for."""
        self._total = self._own.gathered().clone()
        return [sum(self._total)]

    def drop(self) -> None:
        """What was gathered of the round does not count."""
        self._own.clear()

    def used(self) -> list[bool]:
        """Which parameters have a gradient of this rank's own."""
        return self._own.used()

    def apply(self, used: Sequence[bool], factor: float = 1.0) -> None:
        """The sums, times ``factor``, become the gradients."""
        assert self._total is not None
        self._own.give(self._total)
        if factor != 1.0:
            torch._foreach_mul_([p.grad for p in self._parameters if p.grad is not None], factor)

    def close(self) -> None:
        """The model has no hooks."""
