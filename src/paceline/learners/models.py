"""The models that ``paceline train`` trains, by name.

    model = create("resnet18", shape=(3, 32, 32), classes=10)

A model takes images of the shape it was created for, float32 in [0, 1], and returns one logit per class.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional

from paceline.errors import PacelineError, expected, whole

BORDER = 4  # most pixels that a border of zeros may add to a side: MNIST's 28 become the 32 of LeNet-5
HIDDEN = 64  # units of the perceptron
STAGES = ((64, 64), (128, 128), (256, 256, 256), (512, 512, 512), (512, 512, 512))  # widths of VGG-16

Shape = tuple[int, int, int]


class PadOrResize(nn.Module):
    """Fits images to ``side``: up to 4 missing pixels become a border of zeros, others (8 x 8 digits) are resized."""

    def __init__(self, side: int) -> None:
        super().__init__()
        self.side = side

    def forward(self, x: Tensor) -> Tensor:
        """Convert (count, channels, height, width) to (count, channels, side, side)."""
        rows, columns = self.side - x.shape[-2], self.side - x.shape[-1]
        if rows == columns == 0:
            return x
        if not (0 <= rows <= BORDER and 0 <= columns <= BORDER):
            return functional.interpolate(x, size=(self.side,) * 2, mode="bilinear", align_corners=False)
        return functional.pad(x, (columns // 2, columns - columns // 2, rows // 2, rows - rows // 2))


def mlp(shape: Shape, classes: int) -> nn.Module:
    """A perceptron with one hidden layer, the small model of the demo: pixels, 64 hidden units with ReLU, logits."""
    return nn.Sequential(
        nn.Flatten(),
        nn.Linear(math.prod(shape), HIDDEN),
        nn.ReLU(),
        nn.Linear(HIDDEN, classes),
    )


class ChannelsLast(nn.Module):
    """Puts the channels of each pixel next to each other in memory, which makes convolutions a third faster."""

    def forward(self, x: Tensor) -> Tensor:
        return x.to(memory_format=torch.channels_last)


def cnn(shape: Shape, classes: int) -> nn.Module:
    """A small convolutional network: two convolutions with 5 x 5 filters, and two dense layers.

    This is the shape of the network that Xu, Neglia and Sebastianelli train on MNIST ("Dynamic Backup Workers for
    Parallel Machine Learning", 2021). Their text gives no widths: 10 and 20 filters and 50 hidden units are those of
    PyTorch's own small MNIST network of that time, here without its dropout. 21,840 parameters on one channel and 10
    classes.

    Works on 28 x 28; up to 4 pixels less get a border, other sizes are resized (``PadOrResize``).

    Pooling comes before ReLU: both orders give the same values and gradients, since ReLU is monotone, and in this
    order ReLU has a quarter of the work.
    """
    return nn.Sequential(
        PadOrResize(28),
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


def lenet5(shape: Shape, classes: int) -> nn.Module:
    """LeNet-5: LeCun, Bottou, Bengio, Haffner, "Gradient-based learning applied to document recognition", 1998.

    The form used today: ReLU, max pooling, and every map of the second convolution connected to every map of the
    first. 61,706 parameters on one channel, 62,006 on three. Works on 32 x 32; 28 x 28 gets a border of 2, other
    sizes are resized (``PadOrResize``).
    """
    return nn.Sequential(
        PadOrResize(32),
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


class Block(nn.Module):
    """Two 3 x 3 convolutions with a shortcut around them, a 1 x 1 convolution if the size changes."""

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
            across = nn.Conv2d(inner, outer, 1, stride=stride, bias=False)
            self.around = nn.Sequential(across, nn.BatchNorm2d(outer))
        self.relu = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        return self.relu(self.main(x) + self.around(x))


def resnet18(shape: Shape, classes: int) -> nn.Module:
    """ResNet-18 for small images: He, Zhang, Ren and Sun, "Deep residual learning for image recognition", 2016.

    The CIFAR form: a 3 x 3 first convolution of stride 1 and no pooling after it. 11,173,962 parameters at 3 channels
    and 10 classes. Works on images of any size; three of its four stages halve them.
    """
    first = nn.Conv2d(shape[0], 64, 3, padding=1, bias=False)
    layers: list[nn.Module] = [first, nn.BatchNorm2d(64), nn.ReLU()]
    width = 64
    for outer, stride in ((64, 1), (128, 2), (256, 2), (512, 2)):
        layers += [Block(width, outer, stride), Block(outer, outer, 1)]
        width = outer
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, classes))


def vgg16(shape: Shape, classes: int) -> nn.Module:
    """VGG-16: Simonyan and Zisserman, "Very deep convolutional networks for large-scale image recognition", 2015.

    The CIFAR form: batch norm and one linear layer, 14,728,266 parameters at 3 channels and 10 classes. Works on
    32 x 32; 28 x 28 gets a border of 2, other sizes are resized (``PadOrResize``).
    """
    layers: list[nn.Module] = []
    channels = shape[0]
    for stage in STAGES:
        for width in stage:
            layers += [nn.Conv2d(channels, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU()]
            channels = width
        layers.append(nn.MaxPool2d(2))
    return nn.Sequential(PadOrResize(32), nn.Sequential(*layers), nn.Flatten(), nn.Linear(512, classes))


BUILDERS: dict[str, Callable[[Shape, int], nn.Module]] = {
    "mlp": mlp,
    "cnn": cnn,
    "lenet5": lenet5,
    "resnet18": resnet18,
    "vgg16": vgg16,
}


def create(name: str, shape: Shape, classes: int = 10) -> nn.Module:
    """A new model for images of ``shape`` (channels, height, width); torch's generator draws its weights.

    Raises PacelineError for an unknown name, a shape that is not an image's, or fewer than 2 classes.
    """
    if name not in BUILDERS:
        raise PacelineError(f"model {name!r} is unknown{expected(name, BUILDERS)}")
    if len(shape) != 3 or min(shape) < 1:
        raise PacelineError(
            f"images of shape {tuple(shape)}; expected (channels, height, width), each 1 or more"
        )
    whole("classes", classes, 2)
    channels, height, width = shape
    return BUILDERS[name]((channels, height, width), classes)
