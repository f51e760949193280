"""A model as a function of one flat vector: what a parameter server keeps and workers send."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from paceline.rounds import Vector

Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


class FlatModel:
    """A model whose parameters, and their gradients, are views of one vector each (float32, on the CPU).

    buffers: what the model keeps beside its parameters (batch norm's running statistics), likewise one vector.
    """

    def __init__(self, model: nn.Module, loss: Loss | None = None) -> None:
        self.model, self.loss = model, loss or nn.CrossEntropyLoss()
        parameters = list(model.parameters())
        self.size = sum(p.numel() for p in parameters)
        self._values = torch.empty(self.size)
        self._gradient = torch.zeros(self.size)
        place = 0
        for p in parameters:
            end = place + p.numel()
            self._values[place:end] = p.detach().reshape(-1)
            p.data = self._values[place:end].view_as(p)
            p.grad = self._gradient[place:end].view_as(p)
            place = end
        self._floats = [b for b in model.buffers() if b.is_floating_point()]

    def values(self) -> NDArray[np.float32]:
        """A copy of the parameters, shape (size,)."""
        return self._values.numpy().copy()

    def set(self, values: Vector) -> None:
        """Take these parameters, shape (size,)."""
        self._values.numpy()[:] = values

    def buffers(self) -> NDArray[np.float32]:
        """A copy of the floating-point buffers, flat; empty where there are none."""
        if not self._floats:
            return np.zeros(0, np.float32)
        return torch.cat([b.reshape(-1).float() for b in self._floats]).numpy()

    def set_buffers(self, values: Vector) -> None:
        """Take these buffers."""
        place = 0
        for b in self._floats:
            b.copy_(torch.from_numpy(values[place : place + b.numel()].copy()).view_as(b))
            place += b.numel()

    def gradient(self, inputs: torch.Tensor, targets: torch.Tensor) -> tuple[NDArray[np.float32], float]:
        """The mean loss's gradient at the parameters, shape (size,) (a copy), and the mean loss."""
        self._gradient.zero_()
        loss = self.loss(self.model(inputs), targets)
        loss.backward()
        return self._gradient.numpy().copy(), float(loss.detach())
