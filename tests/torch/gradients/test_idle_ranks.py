"""Ranks without work in a round: they join its collectives, and leave no trace in the model."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from paceline.torch import Pace
from support.guarantees import guarantee
from support.ranks import run_cases, run_ranks
from support.scripted import Script

pytestmark = pytest.mark.processes

BATCH, COUNT = 32, 128


class TwoHeads(nn.Module):
    """A model whose second head only some samples use."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 1), nn.Linear(4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out, some = self.first(x), x[:, 0] > 5
        return out + torch.where(some[:, None], self.second(x), 0.0) if some.any() else out


class Spread(nn.Module):
    """Divides by the spread over the batch, which is zero for a single sample."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 8), nn.Linear(8, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x) / x.std(0).mean()).tanh()


def made(order: str) -> tuple[TwoHeads, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    x, y = torch.randn(COUNT, 4, dtype=torch.float64), torch.randn(COUNT, 1, dtype=torch.float64)
    x[0 if order == "first" else COUNT - 1, 0] = 9.0  # the only sample that uses the second head
    return TwoHeads().double(), x, y


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.1)


def trained(rank: int, ranks: int, order: str, options: dict[str, Any]) -> list[np.ndarray]:
    model, x, y = made(order)
    ddp = DistributedDataParallel(model, find_unused_parameters=True)
    optimizer, loss_of = optimizer_of(ddp), nn.functional.mse_loss
    with Pace(ddp, BATCH, "level", limits=[(24, 24), (8, 8), (0, 0)], **options) as pace:
        for batch in pace.loader(torch.utils.data.TensorDataset(x, y), shuffle=False):
            if pace.host.terms.loop == "round":
                pace.round(batch, lambda x, y: loss_of(ddp(x), y))
            else:
                pace.backward(loss_of(ddp(batch[0]), batch[1]))
            pace.step(optimizer)
    return [p.detach().numpy().copy() for p in model.parameters()]


@guarantee(
    "A parameter that no sample of a round uses has no gradient, also "
    "on an idle rank: weight decay does not move it."
)
@pytest.mark.parametrize("options", [{}, {"loop": "round", "micro_batch": 5}])
@pytest.mark.parametrize("order", ["first", "last"])
def test_idle_rank_uses_no_parameter_that_the_round_does_not_use(order: str, options: dict[str, Any]) -> None:
    """Else that parameter's gradient is 0 instead of None, and weight decay moves it."""
    model, x, y = made(order)
    whole = copy.deepcopy(model)
    optimizer = optimizer_of(whole)
    for inputs, targets in zip(x.split(BATCH), y.split(BATCH), strict=True):
        optimizer.zero_grad()
        nn.functional.mse_loss(whole(inputs), targets).backward()
        optimizer.step()
    for found in run_ranks(3, trained, order, options):
        for ours, theirs in zip(found, whole.parameters(), strict=True):
            np.testing.assert_allclose(ours, theirs.detach().numpy(), rtol=0, atol=1e-12)


WAYS = "backward", "penalty", "round", "hook", "outside", "second model"


def norm_of_the_gradient(loss: torch.Tensor, model: nn.Module) -> torch.Tensor:
    """The square root has no finite derivative at 0."""
    grads = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
    return torch.stack([grad.square().sum() for grad in grads]).sum().sqrt()


def two_spreads() -> list[nn.Module]:
    torch.manual_seed(0)
    return [Spread().double(), Spread().double()]


def loss_of(way: str, x: torch.Tensor, y: torch.Tensor, model: nn.Module, other: nn.Module) -> torch.Tensor:
    loss = nn.functional.mse_loss(model(x) + other(x) if way == "outside" else model(x), y)
    if way == "penalty":
        loss = loss + 0.01 * norm_of_the_gradient(loss, model)
    return loss


def divided_by_the_spread(rank: int, ranks: int, way: str) -> list[np.ndarray]:
    """The parameters after rounds in which one rank has all the work. Two models: the second is part of the first
    one's loss (``outside``), or trained by itself after its step."""
    models, (_, x, y) = two_spreads(), made("first")
    first, second = map(DistributedDataParallel, models)
    optimizer, behind = (torch.optim.SGD(model.parameters(), lr=0.1) for model in models)
    if way == "outside":
        optimizer.add_param_group({"params": list(models[1].parameters())})
    options: Any = {"round": {"loop": "round"}, "hook": {"weigh": "hook"}}.get(way, {})
    with Pace(first, BATCH, Script(((1, 0), (0, 1))), **options) as pace:
        for batch in pace.loader(torch.utils.data.TensorDataset(x, y), shuffle=False):
            if way == "round":
                pace.round(batch, lambda x, y: loss_of(way, x, y, first, second))
            elif way == "hook":
                loss_of(way, *batch, first, second).backward()
            else:
                pace.backward(loss_of(way, *batch, first, second))
            pace.step(optimizer)
            if way == "second model":
                pace.weighted(loss_of(way, *batch, second, first)).backward()
                behind.step()
                behind.zero_grad()
    return [p.detach().numpy().copy() for model in models for p in model.parameters()]


@guarantee("A filler sample counts for nothing, also where its gradient is infinite or not a number.")
def test_filler_sample_without_a_finite_gradient_counts_for_nothing() -> None:
    """The one sample of a rank without work is divided by its spread over one sample."""
    found = run_cases(2, divided_by_the_spread, {way: {"way": way} for way in WAYS})
    for way in WAYS:
        (model, other), (_, x, y) = two_spreads(), made("first")
        trained = nn.ModuleList([model, other])
        optimizer = torch.optim.SGD(trained.parameters(), lr=0.1)
        for inputs, targets in zip(x.split(BATCH), y.split(BATCH), strict=True):
            optimizer.zero_grad()
            loss_of(way, inputs, targets, model, other).backward()
            if way == "second model":
                loss_of(way, inputs, targets, other, model).backward()
            optimizer.step()
        for rank in found[way]:
            for ours, theirs in zip(rank, trained.parameters(), strict=True):
                np.testing.assert_allclose(ours, theirs.detach().numpy(), rtol=0, atol=1e-12, err_msg=way)
