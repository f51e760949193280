"""A small model and its data, and the answer of one process."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from functools import cache
from typing import Any

import torch
from torch import nn

from paceline.torch.feed.pieces import Order
from support.scripted import Script

FEATURES, CLASSES = 6, 3
UNEVEN = Script(((5, 2, 1), (1, 6, 2), (3, 3, 3), (1, 1, 9), (7, 0, 4), (0, 1, 0), (0, 5, 5)))
TWO = Script(((5, 2), (1, 6), (3, 3), (1, 9), (7, 0), (0, 1)))  # the same for two ranks


class Net(nn.Module):
    """Two layers, and one that only some inputs use."""

    def __init__(self, sometimes: bool = False) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(FEATURES, 8), nn.Linear(8, CLASSES)
        self.extra = nn.Linear(8, 8) if sometimes else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.first(x))
        if self.extra is not None:
            chosen = x[:, 0] > 1.5
            if chosen.any():
                hidden = hidden.masked_scatter(chosen[:, None], torch.tanh(self.extra(hidden[chosen])))
        return self.second(hidden)


class Samples(torch.utils.data.Dataset):  # type: ignore[type-arg]
    """Random samples that know their own index."""

    def __init__(self, count: int, dtype: torch.dtype = torch.float64) -> None:
        generator = torch.Generator().manual_seed(7)
        self.x = torch.randn(count, FEATURES, generator=generator, dtype=torch.float64).to(dtype)
        self.y = torch.randint(CLASSES, (count,), generator=generator)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor, int]:
        return self.x[index], self.y[index], index


def fresh(dtype: torch.dtype, **options: Any) -> Net:
    torch.manual_seed(3)
    return Net(**options).to(dtype)


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


@cache
def reference(
    count: int, batch: int, steps: int, dtype: torch.dtype, sometimes: bool = False
) -> list[torch.Tensor]:
    """The parameters after ``steps`` rounds of one process that takes each whole batch itself."""
    epochs = (torch.from_numpy(Order(count, 5).epoch(epoch)) for epoch in itertools.count())
    rounds = itertools.islice((part for epoch in epochs for part in epoch.split(batch)), steps)
    return replayed(rounds, Samples(count, dtype), sometimes=sometimes)


def replayed(rounds: Iterable[Any], data: Samples, **options: Any) -> list[torch.Tensor]:
    """The parameters of one process that takes the samples with these indices in each round."""
    model = fresh(data.x.dtype, **options)
    optimizer = optimizer_of(model)
    for indices in rounds:
        chosen = torch.as_tensor(indices)
        nn.functional.cross_entropy(model(data.x[chosen]), data.y[chosen]).backward()
        optimizer.step()
        optimizer.zero_grad()
    return [p.detach() for p in model.parameters()]


def difference(found: Iterable[Any], expected: Iterable[torch.Tensor]) -> float:
    """The largest difference of parameters (tensors or nested lists), relative to the largest of each."""
    return max(
        float((torch.as_tensor(p, dtype=q.dtype).detach() - q.detach()).abs().max() / q.detach().abs().max())
        for p, q in zip(found, expected, strict=True)
    )
