"""Loops whose gradients are still there when the next backward pass begins, and loops that zero them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from paceline.errors import PacelineError
from paceline.torch import Pace
from support.torch_jobs import Samples, fresh

ROUNDS = 4
Step = Callable[[Pace, list[torch.optim.Optimizer]], object]


def own(pace: Pace, optimizers: list[torch.optim.Optimizer]) -> None:
    for one in optimizers:
        one.step()


def own_and_in_place(pace: Pace, optimizers: list[torch.optim.Optimizer]) -> None:
    for one in optimizers:
        one.step()
        one.zero_grad(set_to_none=False)


STEPS: dict[str, Step] = {
    "the loop's own steps": own,
    "one of two": lambda pace, optimizers: pace.step(optimizers[0]),
    "zeroed in place": own_and_in_place,
    "both": lambda pace, optimizers: pace.step(optimizers),
}
OWN = ("the loop's own steps", "zeroed in place")  # not by ``pace.step``
RIGHT = ("zeroed in place", "both")


def train(model: nn.Module, net: Any, step: Step, **options: Any) -> tuple[int, str]:
    """The rounds that were run, and the sentence that ended them."""
    optimizers: list[torch.optim.Optimizer] = [
        torch.optim.SGD(layer.parameters(), lr=0.1) for layer in (net.first, net.second)
    ]
    pace, loss_of = Pace(model, 8, "equal", **options), nn.CrossEntropyLoss()
    try:
        for batch in pace.loader(Samples(8 * ROUNDS), seed=5):
            if options.get("loop") == "round":
                pace.round(batch, lambda x, y, _: loss_of(model(x), y))
            else:
                loss = loss_of(model(batch[0]), batch[1])
                loss.backward() if options.get("weigh") == "hook" else pace.backward(loss)
            step(pace, optimizers)
        return pace.rounds, ""
    except PacelineError as error:
        return pace.rounds, str(error)
    finally:
        pace.host.detach()


def under_the_hook(rank: int, ranks: int) -> dict[str, tuple[int, str]]:
    """For each way to step: the rounds that were run, and the sentence that ended them."""
    found = {}
    for name, step in STEPS.items():
        net = fresh(torch.float64)
        found[name] = train(DistributedDataParallel(net), net, step, weigh="hook")
    return found
