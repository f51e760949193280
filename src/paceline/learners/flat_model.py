"""A model as a function of one flat vector, one gradient at a time, and which models can be trained so."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.nn.parameter import UninitializedParameter

from paceline.errors import PacelineError, short
from paceline.rounds import Vector

TOO_FEW = (
    "Expected more than 1 value per channel"  # how torch's batch norm begins its error about a single sample
)
Loss = Callable[[Any, torch.Tensor], torch.Tensor]


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
    for name, module in model.named_modules():
        where = f"the model's layer {name!r}" if name else "the model"
        if any(isinstance(each, UninitializedParameter) for each in module.parameters(recurse=False)):
            raise PacelineError(
                f"{where} is {type(module).__name__}, which learns its sizes from its first batch; call the model "
                "once with a batch before you return it"
            )
        if module.training and getattr(module, "track_running_stats", False):
            raise PacelineError(
                f"{where} is {type(module).__name__}, whose running statistics stay in each worker; "
                "use GroupNorm or LayerNorm, or track_running_stats=False"
            )
    dtype_of(model)


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
