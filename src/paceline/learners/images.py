"""Models as functions of one flat vector, one gradient at a time, as a parameter server and its workers need them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.nn import functional

from paceline.data import datasets
from paceline.data.datasets import Data
from paceline.errors import PacelineError, short
from paceline.learners import models
from paceline.rounds import Indices, Vector

CHUNK = 1000
TOO_FEW = (
    "Expected more than 1 value per channel"  # how torch's batch norm begins its error about a single sample
)
Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def tensor(images: np.ndarray) -> torch.Tensor:
    """Images as a tensor for a model, float32 in [0, 1]."""
    return torch.from_numpy(datasets.floats(images))


def dtype_of(model: nn.Module) -> torch.dtype:
    """The dtype of all parameters of a model, float32 or float64, in which its vectors travel and are added.

    Raises PacelineError for others, and for several at the same time.
    """
    found = {p.dtype for p in model.parameters()}
    if len(found) > 1 or not found <= {torch.float32, torch.float64}:
        names = " and ".join(sorted(str(each).removeprefix("torch.") for each in found))
        raise PacelineError(
            f"the model has parameters in {names}; expected all in float32 or all in float64: return model.float() "
            "or model.double()"
        )
    return found.pop() if found else torch.float32


def check_trainable(model: Any) -> None:
    """Raises PacelineError for a model that cannot be trained as one vector of parameters, without its buffers."""
    if not isinstance(model, nn.Module):
        raise PacelineError(f"the function model returned {short(model)}: expected a torch.nn.Module")
    dtype_of(model)
    for name, module in model.named_modules():
        if module.training and getattr(module, "track_running_stats", False):
            raise PacelineError(
                f"the model's layer {name!r} is {type(module).__name__}, whose running statistics stay in each "
                "worker; use GroupNorm or LayerNorm, or track_running_stats=False"
            )


def check_unchanged(model: nn.Module, before: Mapping[str, torch.Tensor]) -> None:
    """Raises PacelineError if training has changed floating-point buffers. before: copies of them, by name.

    A buffer that a forward pass makes or resizes is taken for a cache, which each worker can make.
    """
    for name, now in model.named_buffers():
        old = before.get(name)
        if (
            old is None
            or old.shape != now.shape
            or torch.allclose(old, now, rtol=0.0, atol=0.0, equal_nan=True)
        ):
            continue
        raise PacelineError(
            f"the model changes its buffer {name!r} in training, and buffers stay in each worker; expected a model "
            "whose state is all in its parameters"
        )


class FlatModel:
    """A model whose parameters, and their gradients, are views of one vector each (in their dtype, on the CPU).

    buffers: the model's state besides its parameters (batch norm's running statistics), also as one vector.

    Raises PacelineError for parameters that are not all float32 or all float64.
    """

    def __init__(self, model: nn.Module, loss: Loss | None = None) -> None:
        self.model, self.loss = model, loss or nn.CrossEntropyLoss()
        parameters = list(model.parameters())
        self.size = sum(p.numel() for p in parameters)
        dtype = dtype_of(model)
        self._values = torch.empty(self.size, dtype=dtype)
        self._gradient = torch.zeros(self.size, dtype=dtype)
        place = 0
        for p in parameters:
            end = place + p.numel()
            self._values[place:end] = p.detach().reshape(-1)
            p.data = self._values[place:end].view_as(p)
            p.grad = self._gradient[place:end].view_as(p)
            place = end
        self._floats = [b for b in model.buffers() if b.is_floating_point()]

    def values(self) -> Vector:
        """A copy of the parameters, shape (size,)."""
        values: Vector = self._values.numpy().copy()
        return values

    def set(self, values: Vector) -> None:
        """Set the parameters, shape (size,)."""
        self._values.numpy()[:] = values

    def buffers(self) -> NDArray[np.float32]:
        """A float32 copy of the floating-point buffers, flat; empty if there are none."""
        if not self._floats:
            return np.zeros(0, np.float32)
        return torch.cat([b.reshape(-1).float() for b in self._floats]).numpy()

    def set_buffers(self, values: Vector) -> None:
        """Set the floating-point buffers, from a flat vector."""
        place = 0
        for b in self._floats:
            b.copy_(torch.from_numpy(values[place : place + b.numel()].copy()).view_as(b))
            place += b.numel()

    def gradient(self, inputs: torch.Tensor, targets: torch.Tensor) -> tuple[Vector, float]:
        """The gradient of the mean loss, shape (size,) (a copy), and the mean loss.

        Raises PacelineError if batch norm gets a single sample that it cannot normalize.
        """
        self._gradient.zero_()
        try:
            loss = self.loss(self.model(inputs), targets)
        except ValueError as error:
            if not str(error).startswith(TOO_FEW):
                raise
            raise PacelineError(
                f"a worker got {len(inputs)} sample, and the model's batch norm needs 2; use GroupNorm or LayerNorm, "
                "or the policy level with limits=[(2, None)] * workers"
            ) from error
        loss.backward()
        return self._gradient.numpy().copy(), float(loss.detach())


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
