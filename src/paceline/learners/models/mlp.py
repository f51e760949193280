"""A perceptron with one hidden layer: the small model of the demo."""

from __future__ import annotations

import math

from torch import nn

HIDDEN = 64


def mlp(shape: tuple[int, int, int], classes: int) -> nn.Module:
    """Flattened pixels, 64 hidden units with ReLU, logits."""
    return nn.Sequential(
        nn.Flatten(),
        nn.Linear(math.prod(shape), HIDDEN),
        nn.ReLU(),
        nn.Linear(HIDDEN, classes),
    )
