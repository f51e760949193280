"""Models on images, as a parameter server and its workers need them."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.nn import functional

from paceline.data import datasets
from paceline.data.datasets import Data
from paceline.learners import models
from paceline.learners.flat_model import FlatModel
from paceline.rounds import Indices, Vector

CHUNK = 1000


def tensor(images: np.ndarray) -> torch.Tensor:
    """Images as a tensor for a model, float32 in [0, 1]."""
    return torch.from_numpy(datasets.floats(images))


@torch.no_grad()
def evaluated(
    model: nn.Module, data: Data, prepare: Callable[[np.ndarray], torch.Tensor] = tensor
) -> tuple[float, float]:
    """Mean loss and accuracy of a model on the test set. prepare: converts images to the model's inputs."""
    model.eval()
    loss = right = 0.0
    for start in range(0, len(data.x_test), CHUNK):
        logits = model(prepare(data.x_test[start : start + CHUNK]))
        targets = torch.from_numpy(data.y_test[start : start + CHUNK])
        loss += float(functional.cross_entropy(logits, targets, reduction="sum"))
        right += float((logits.argmax(1) == targets).sum())
    model.train()
    return loss / len(data.x_test), right / len(data.x_test)


class Images:
    """A model of ``paceline.learners.models`` on a data set in memory, as a ``Learner``.

    standardize: shift and scale the pixels to mean 0 and standard deviation 1 over the training set, as is
        usual for MNIST and CIFAR-10; otherwise they are in [0, 1]. DBW, eqs. (1), (2).
    """

    def __init__(self, data: Data, model: str, seed: int = 0, standardize: bool = True) -> None:
        torch.manual_seed(seed)
        self.data = data
        self._flat = FlatModel(models.create(model, data.shape, data.classes))
        self._start = self._flat.values()
        self._targets = torch.from_numpy(data.y_train)
        sample = datasets.floats(data.x_train[:: max(1, len(data.x_train) // 2000)])
        self._mean, self._sd = (float(sample.mean()), float(sample.std())) if standardize else (0.0, 1.0)

    @property
    def model(self) -> nn.Module:
        """The model, whose parameters are those of the last call."""
        return self._flat.model

    def start(self) -> Vector:
        """The initial weights, which torch's generator drew for the seed; a copy."""
        return self._start.copy()

    def gradient(self, values: Vector, samples: Indices) -> tuple[Vector, float]:
        """Gradient of the mean cross-entropy over these training samples, and its value."""
        self._flat.set(values)
        return self._flat.gradient(self._inputs(self.data.x_train[samples]), self._targets[samples])

    @torch.no_grad()
    def loss(self, values: Vector, samples: Indices) -> float:
        """The mean cross-entropy over these training samples, without its gradient."""
        self._flat.set(values)
        logits = self._flat.model(self._inputs(self.data.x_train[samples]))
        return float(functional.cross_entropy(logits, self._targets[samples]))

    def buffers(self) -> NDArray[np.float32]:
        """The model's state besides its parameters, flat."""
        return self._flat.buffers()

    def test(self, values: Vector, buffers: Vector | None = None) -> tuple[float, float]:
        """Mean loss and accuracy on the test set."""
        self._flat.set(values)
        if buffers is not None:
            self._flat.set_buffers(buffers)
        return evaluated(self._flat.model, self.data, self._inputs)

    def _inputs(self, images: np.ndarray) -> torch.Tensor:
        return (tensor(images) - self._mean) / self._sd
