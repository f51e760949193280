"""Gradients that a step was taken with and that are still there: the next backward pass would count them again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from paceline.errors import PacelineError
from paceline.torch import Pace
from support.ranks import run_cases
from support.small_net import Samples, fresh

GUARANTEES = (
    "A loop with a line left out, doubled, swapped or replaced (101 cases) trains the same model or "
    "raises before the step.",
)

ROUNDS = 4
FORMS: tuple[dict[str, Any], ...] = ({}, {"loop": "round"}, {"loop": "pieces", "micro_batch": 3})
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
CASES = [
    (name, options) for name in STEPS for options in FORMS
    if not (options.get("loop") == "pieces" and name in OWN)  # refused within a round, whatever follows
]  # fmt: skip
RIGHT = ("zeroed in place", "both")


def check(name: str, rounds: int, sentence: str) -> None:
    if name in RIGHT:
        assert (rounds, sentence) == (ROUNDS, ""), name
    else:
        assert sentence.startswith("round 1: gradients of the round before are still in the model"), name


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


@pytest.mark.parametrize(("name", "options"), CASES, ids=str)
def test_gradients_not_zeroed_after_a_step_raise(name: str, options: dict[str, Any]) -> None:
    net = fresh(torch.float64)
    check(name, *train(net, net, STEPS[name], **options))


def under_the_hook(rank: int, ranks: int, name: str) -> tuple[int, str]:
    net = fresh(torch.float64)
    return train(DistributedDataParallel(net), net, STEPS[name], weigh="hook")


@pytest.mark.processes
def test_gradients_not_zeroed_under_the_hook_raise() -> None:
    for name, ranks in run_cases(2, under_the_hook, {name: {"name": name} for name in STEPS}).items():
        for found in ranks:
            check(name, *found)
