"""LeNet-5: LeCun, Bottou, Bengio, Haffner, "Gradient-based learning applied to document recognition", 1998.

In the form used today: ReLU, max pooling, and every map of the second convolution joined to every map of the
first. 61,706 parameters on one channel, 62,006 on three.
"""

from __future__ import annotations

from torch import nn

from paceline.learners.models.fit import Fit


def lenet5(shape: tuple[int, int, int], classes: int) -> nn.Module:
    """Works on 32 x 32; 28 x 28 gets a border of 2, other sizes are resized (``Fit``)."""
    return nn.Sequential(
        Fit(32),
        nn.Conv2d(shape[0], 6, kernel_size=5),  # 28 x 28
        nn.ReLU(),
        nn.MaxPool2d(2),  # 14 x 14
        nn.Conv2d(6, 16, kernel_size=5),  # 10 x 10
        nn.ReLU(),
        nn.MaxPool2d(2),  # 5 x 5
        nn.Flatten(),
        nn.Linear(16 * 5 * 5, 120),
        nn.ReLU(),
        nn.Linear(120, 84),
        nn.ReLU(),
        nn.Linear(84, classes),
    )
