"""A small convolutional network: two convolutions with 5 x 5 filters, and two dense layers.

This is the shape of the network that Xu, Neglia and Sebastianelli train on MNIST ("Dynamic Backup Workers for
Parallel Machine Learning", 2021). Their text gives no widths: 10 and 20 filters and 50 hidden units are those of
PyTorch's own small MNIST network of that time, here without its dropout. 21,840 parameters on one channel and 10
classes.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from paceline.learners.models.fit import Fit


class ChannelsLast(nn.Module):
    """The same images with their channels next to each other in memory: the convolutions are a third quicker so."""

    def forward(self, x: Tensor) -> Tensor:
        return x.to(memory_format=torch.channels_last)


def cnn(shape: tuple[int, int, int], classes: int) -> nn.Module:
    """Works on 28 x 28; up to 4 pixels less get a border, other sizes are resized (``Fit``).

    Pooling comes before ReLU: both orders give the same values and gradients, since ReLU never falls, and this one
    leaves ReLU a quarter of the work.
    """
    return nn.Sequential(
        Fit(28),
        ChannelsLast(),
        nn.Conv2d(shape[0], 10, kernel_size=5),  # 24 x 24
        nn.MaxPool2d(2),  # 12 x 12
        nn.ReLU(),
        nn.Conv2d(10, 20, kernel_size=5),  # 8 x 8
        nn.MaxPool2d(2),  # 4 x 4
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(20 * 4 * 4, 50),
        nn.ReLU(),
        nn.Linear(50, classes),
    )
