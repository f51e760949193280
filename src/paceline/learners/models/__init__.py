"""The models that ``paceline train`` trains, one a file, by name.

    model = create("resnet18", shape=(3, 32, 32), classes=10)

A model takes images of the shape it was created for, float32 in [0, 1], and gives one logit a class.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from paceline.errors import PacelineError, expected
from paceline.learners.models.cnn import cnn
from paceline.learners.models.lenet5 import lenet5
from paceline.learners.models.mlp import mlp
from paceline.learners.models.resnet18 import resnet18
from paceline.learners.models.vgg16 import vgg16

Shape = tuple[int, int, int]
_BUILDERS: dict[str, Callable[[Shape, int], nn.Module]] = {
    "mlp": mlp,
    "cnn": cnn,
    "lenet5": lenet5,
    "resnet18": resnet18,
    "vgg16": vgg16,
}


def names() -> tuple[str, ...]:
    """The models that ``create`` knows."""
    return tuple(_BUILDERS)


def create(name: str, shape: Shape, classes: int = 10) -> nn.Module:
    """A fresh model for images of ``shape`` (channels, height, width); torch's generator draws its weights.

    Raises PacelineError for an unknown name, a shape that is no image, or fewer than 2 classes.
    """
    if name not in _BUILDERS:
        raise PacelineError(f"model {name!r} is unknown{expected(name, _BUILDERS)}")
    if len(shape) != 3 or min(shape) < 1:
        raise PacelineError(
            f"images of shape {tuple(shape)}; expected (channels, height, width), each 1 or more"
        )
    if classes < 2:
        raise PacelineError(f"classes={classes}: expected at least 2")
    channels, height, width = shape
    return _BUILDERS[name]((channels, height, width), classes)
