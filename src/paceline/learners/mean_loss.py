"""A loss of which workers with different numbers of samples make the gradient of all: a plain mean over the samples.

Whether it is one shows in its values: that of a batch is then the mean of those of its halves, weighted by their
samples. That is not so for a sum, a mean by class weights, or a loss that compares samples.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn

from paceline.errors import PacelineError, short
from paceline.learners.flat_model import Loss

LOOKS = 8  # gradients whose loss is also computed of both halves of their samples
ROUNDING = 1e3  # roundings of its dtype by which a mean may differ from that of its halves


def check_loss(loss: Any) -> None:
    """Raises PacelineError for a loss with parameters, which would not be trained."""
    if isinstance(loss, nn.Module) and any(p.requires_grad for p in loss.parameters()):
        raise PacelineError(
            f"the loss {type(loss).__name__} has parameters, and only those of the model are trained; compute what "
            "needs them in the model's forward"
        )


class MeanLoss:
    """A loss that is a plain mean over the samples, as gradients are weighed by their numbers of samples.

    Raises PacelineError if one of its first ``LOOKS`` values is not that of both halves of its samples: for a sum,
    class weights, a comparison of samples.
    """

    def __init__(self, loss: Loss) -> None:
        self._loss, self._left = loss, LOOKS

    def __call__(self, outputs: Any, targets: torch.Tensor) -> torch.Tensor:
        loss = self._loss(outputs, targets)
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
            given = (
                f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, torch.Tensor) else short(loss)
            )
            raise PacelineError(f"the loss returned {given}; expected one number, the mean over the samples")
        if self._left and len(targets) > 1 and loss.is_floating_point():
            self._left -= 1
            with torch.random.fork_rng(devices=[]):
                self._check(float(loss), outputs, targets, ROUNDING * torch.finfo(loss.dtype).eps)
        return loss

    def _check(self, whole: float, outputs: Any, targets: torch.Tensor, tolerance: float) -> None:
        many, half = len(targets), len(targets) // 2
        sizes, values = (half, many - half), []
        for rows in (slice(half), slice(half, None)):
            part = _part(outputs, rows, many)
            if part is None:
                return
            values.append(float(self._loss(part, targets[rows])))
        mean = sum(size * value for size, value in zip(sizes, values, strict=True)) / many
        if abs(mean - whole) <= tolerance * max(map(abs, (whole, *values))) or not math.isfinite(whole):
            return
        if float(self._loss(outputs, targets)) == whole:  # else it is random
            raise PacelineError(
                f"the loss of {many} samples is {whole:.4g}, and of its halves {values[0]:.4g} and {values[1]:.4g}; "
                "expected a plain mean over the samples, since workers have different numbers of them: divide what "
                "each sample adds by the number of samples, also with class weights"
            )


def _part(outputs: Any, rows: slice, many: int) -> Any:
    """These rows of a model's outputs of ``many`` samples; None if these are not all tensors with a row for each."""
    if isinstance(outputs, torch.Tensor):
        return outputs[rows] if outputs.ndim and len(outputs) == many else None
    if isinstance(outputs, dict):
        parts = {name: _part(each, rows, many) for name, each in outputs.items()}
        return None if any(each is None for each in parts.values()) else parts
    if type(outputs) in (tuple, list):
        found = [_part(each, rows, many) for each in outputs]
        return None if any(each is None for each in found) else type(outputs)(found)
    return None
