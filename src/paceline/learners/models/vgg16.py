"""VGG-16: Simonyan and Zisserman, "Very deep convolutional networks for large-scale image recognition", 2015.

The CIFAR form: batch norm and one linear layer, 14,728,266 parameters at 3 channels and 10 classes.
"""

from __future__ import annotations

from torch import nn

from paceline.learners.models.fit import Fit

STAGES = ((64, 64), (128, 128), (256, 256, 256), (512, 512, 512), (512, 512, 512))


def features(channels: int, batch_norm: bool) -> nn.Sequential:
    """The thirteen 3 x 3 convolutions; each of the five stages ends by halving the image."""
    layers: list[nn.Module] = []
    for stage in STAGES:
        for width in stage:
            layers.append(nn.Conv2d(channels, width, 3, padding=1))
            if batch_norm:
                layers.append(nn.BatchNorm2d(width))
            layers.append(nn.ReLU())
            channels = width
        layers.append(nn.MaxPool2d(2))
    return nn.Sequential(*layers)


def vgg16(shape: tuple[int, int, int], classes: int) -> nn.Module:
    """Works on 32 x 32; 28 x 28 gets a border of 2, other sizes are resized (``Fit``)."""
    return nn.Sequential(Fit(32), features(shape[0], batch_norm=True), nn.Flatten(), nn.Linear(512, classes))
