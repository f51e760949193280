"""ResNet-18 for small images: He, Zhang, Ren and Sun, "Deep residual learning for image recognition", 2016.

The CIFAR form: a 3 x 3 first convolution of stride 1 and no pooling after it. 11,173,962 parameters at 3
channels and 10 classes.
"""

from __future__ import annotations

from torch import Tensor, nn


class Block(nn.Module):
    """Two 3 x 3 convolutions and the way around them, a 1 x 1 convolution where the size changes."""

    def __init__(self, inner: int, outer: int, stride: int) -> None:
        super().__init__()
        self.main = nn.Sequential(
            nn.Conv2d(inner, outer, 3, stride=stride, padding=1, bias=False),
            nn.BatchNorm2d(outer),
            nn.ReLU(),
            nn.Conv2d(outer, outer, 3, padding=1, bias=False),
            nn.BatchNorm2d(outer),
        )
        self.around: nn.Module = nn.Identity()
        if stride != 1 or inner != outer:
            self.around = nn.Sequential(
                nn.Conv2d(inner, outer, 1, stride=stride, bias=False), nn.BatchNorm2d(outer)
            )
        self.relu = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        return self.relu(self.main(x) + self.around(x))


def resnet18(shape: tuple[int, int, int], classes: int) -> nn.Module:
    """Works on images of any size; three of its four stages halve them."""
    layers: list[nn.Module] = [
        nn.Conv2d(shape[0], 64, 3, padding=1, bias=False),
        nn.BatchNorm2d(64),
        nn.ReLU(),
    ]
    width = 64
    for outer, stride in ((64, 1), (128, 2), (256, 2), (512, 2)):
        layers += [Block(width, outer, stride), Block(outer, outer, 1)]
        width = outer
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, classes))
