"""Losses that are already normalised over the samples of all ranks, or functions of a statistic of them."""

from __future__ import annotations

import torch
from torch import nn

COUNT, BATCH, IN, OUT = 90, 24, 6, 3


class Pictures(torch.utils.data.Dataset):  # type: ignore[type-arg]
    """Random samples, each with a number of boxes."""

    def __init__(self) -> None:
        draw = torch.Generator().manual_seed(11)
        self.x = torch.randn(COUNT, IN, generator=draw, dtype=torch.float64)
        self.y = torch.randn(COUNT, OUT, generator=draw, dtype=torch.float64)
        self.boxes = torch.randint(1, 6, (COUNT,), generator=draw).double()

    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return self.x[index], self.y[index], self.boxes[index]


def model() -> nn.Sequential:
    torch.manual_seed(4)
    return nn.Sequential(nn.Linear(IN, 5), nn.Tanh(), nn.Linear(5, OUT)).double()


def boxed(out: torch.Tensor, y: torch.Tensor, boxes: torch.Tensor) -> torch.Tensor:
    """The summed loss of all boxes."""
    return ((out - y).square().sum(1) * boxes).sum()


def of_moments(mean: torch.Tensor, square: torch.Tensor) -> torch.Tensor:
    """A loss that is no sum over samples."""
    return (mean.square() + (square - mean.square() - 1).square()).sum() + mean.prod()
