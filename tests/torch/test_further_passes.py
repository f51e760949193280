"""Programs with more backward passes a step than one: before the round's own, within the loss, and after its step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.func import functional_call
from torch.nn.parallel import DistributedDataParallel

from paceline.errors import PacelineError
from paceline.torch import Pace
from paceline.torch.feed.pieces import Order
from paceline.torch.gradients.reducers import LOOKS
from paceline.torch.hooks_of_torch import GradientsOfPass
from support.guarantees import guarantee
from support.ranks import run_cases
from support.scripted import Script
from support.small_net import TWO, Samples, difference, fresh

ROUNDS, BATCH = 6, 16
LOSS = nn.CrossEntropyLoss()
Models = tuple[nn.Module, torch.optim.Optimizer, torch.optim.Optimizer]


class Adapted(nn.Module):
    """The loss of each sample under parameters of its own, which one step of gradient descent has adapted (MAML)."""

    def __init__(self) -> None:
        super().__init__()
        self.net = fresh(torch.float64)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        own, total = dict(self.net.named_parameters()), torch.zeros(())
        for one, label in zip(x.split(1), y.split(1), strict=True):
            slopes = torch.autograd.grad(
                LOSS(self.net(one.flip(1)), label), [*own.values()], create_graph=True
            )
            fast = {name: p - 0.4 * slope for (name, p), slope in zip(own.items(), slopes, strict=True)}
            total = total + LOSS(functional_call(self.net, fast, (one,)), label)
        return total / max(len(x), 1)


def models(adapted: bool) -> Models:
    """A model, and two optimizers of all its parameters."""
    torch.manual_seed(3)
    model = Adapted() if adapted else fresh(torch.float64)
    return model, *(torch.optim.SGD(model.parameters(), lr=rate) for rate in (0.1, 0.05))


def penalty(model: Callable[..., torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    """R1: the squared gradient by the inputs, a mean over the samples. The gradient of the last bias is zero."""
    x = x.clone().requires_grad_()
    out = model(x)
    (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
    return slope.square().sum() / max(len(x), 1) + 0 * out.sum()


def alone(how: str) -> nn.Module:
    """The model of one process."""
    model, first, second = models(how == "adapted")
    data = Samples(BATCH * ROUNDS)
    for chosen in torch.from_numpy(Order(len(data), 5).epoch(0)).split(BATCH):
        x, y = data.x[chosen], data.y[chosen]
        (model(x, y) if how == "adapted" else LOSS(model(x), y)).backward()
        first.step()
        first.zero_grad()
        if how == "adapted":
            continue
        (penalty(model, x) if how == "penalty" else LOSS(model(x.flip(1)), y)).backward()
        second.step()
        first.zero_grad()
    return model


def repeating(model: nn.Module) -> torch.optim.LBFGS:
    return torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=2)


def closed_alone() -> nn.Module:
    """The model of one process that LBFGS trains."""
    model, data = fresh(torch.float64), Samples(BATCH * ROUNDS)
    optimizer = repeating(model)
    for chosen in torch.from_numpy(Order(len(data), 5).epoch(0)).split(BATCH):

        def closure(chosen: torch.Tensor = chosen) -> torch.Tensor:
            optimizer.zero_grad()
            loss = LOSS(model(data.x[chosen]), data.y[chosen])
            loss.backward()
            return loss

        optimizer.step(closure)
    return model


def closed(own: bool, weigh: str) -> float:
    """The largest difference from one process with LBFGS. own: the closure returns this rank's own loss."""
    model = fresh(torch.float64)
    ddp, optimizer = DistributedDataParallel(model), repeating(model)
    with Pace(ddp, BATCH, TWO, limits=[(0, None)] * 2, weigh=weigh) as pace:
        for x, y, _ in pace.loader(Samples(BATCH * ROUNDS), seed=5):
            first = [True]

            def closure(x: torch.Tensor = x, y: torch.Tensor = y, first: list[bool] = first) -> torch.Tensor:
                optimizer.zero_grad()
                loss = LOSS(ddp(x), y)
                if weigh == "hook":
                    loss.backward()
                elif first:
                    pace.backward(loss)
                    first.clear()
                else:
                    pace.weighted(loss).backward()
                return loss if own else pace.mean(loss)

            optimizer.step(closure)
    return difference(model.parameters(), closed_alone().parameters())


def paced(
    rank: int, ranks: int, how: str, through: str = "ddp", weigh: str = "loss", after: int = 0
) -> str | float:
    """The largest difference from one process, or the message of the error.

    after: rounds without a further pass, at the beginning.
    """
    if how.startswith("LBFGS"):
        try:
            return closed(how == "LBFGS by its own loss", weigh)
        except PacelineError as error:
            return str(error)
    model, first, second = models(how == "adapted")
    ddp = DistributedDataParallel(model)
    again = ddp if through == "ddp" else model
    rate, rounds = torch.ones((), requires_grad=True), ROUNDS + after
    loads = Script(((5, 2), (1, 6), (3, 3))) if how == "zeroed" else TWO
    with Pace(ddp, BATCH, loads, limits=[(0, None)] * 2, weigh=weigh) as pace:
        try:
            for step, (x, y, _) in enumerate(pace.loader(Samples(BATCH * rounds), seed=5)):
                if how == "weighted first":
                    pace.weighted(LOSS(ddp(x), y)).backward()
                    second.step()
                loss = ddp(x, y) if how == "adapted" else LOSS(ddp(x), y)
                loss.backward() if weigh == "hook" else pace.backward(loss)
                pace.step(first)
                if how == "adapted" or step < after:
                    continue
                if how in ("removed", "zeroed"):  # a pass through the module, whose gradients are of no use
                    pace.weighted(LOSS(model(x), y)).backward()
                    first.zero_grad(set_to_none=how == "removed")
                pace.weighted(penalty(again, x) if how == "penalty" else LOSS(again(x.flip(1)), y)).backward()
                if how == "one between":  # it leaves nothing in this model
                    pace.weighted((rate * torch.ones(3)).sum()).backward()
                (first if how == "same optimizer" else second).step()
                first.zero_grad()
                if how == "stepped again without a pass":
                    second.step()
        except PacelineError as error:
            return str(error)
    return difference(model.parameters(), alone(how).parameters())


@guarantee(
    "An inner loop by `torch.autograd.grad` (MAML), and a second pass with the step of another optimizer, train the "
    "model of one process."
)
@guarantee(
    "A second pass whose gradients are not summed over the ranks raises on each rank before they are used; if it "
    "first comes after 16 rounds, at the next one."
)
@guarantee(
    "LBFGS trains the model of one process if its closure returns `pace.mean(loss)`; a loss that differs between "
    "ranks raises on all of them."
)
@pytest.mark.processes
def test_further_passes_train_the_model_of_one_process_or_raise() -> None:
    exact: dict[str, dict[str, Any]] = {
        "adapted": {"how": "adapted"},
        "adapted, by the hook": {"how": "adapted", "weigh": "hook"},
        "penalty": {"how": "penalty"},
        "second": {"how": "second"},
        "one between": {"how": "one between"},
        "zeroed": {"how": "zeroed"},
        "removed": {"how": "removed"},
        "LBFGS": {"how": "LBFGS"},
        "LBFGS, by the hook": {"how": "LBFGS", "weigh": "hook"},
    }
    # A rank that has no work in round 4 of TWO, whose gradients are zeros, raises as the others do.
    unsummed: dict[str, tuple[int, dict[str, Any]]] = {
        "module": (0, {"how": "second", "through": "module"}),
        "penalty of the module": (0, {"how": "penalty", "through": "module"}),
        "hook": (0, {"how": "second", "weigh": "hook"}),
        "idle rank": (4, {"how": "second", "through": "module", "after": 4}),
        "late": (LOOKS + 2, {"how": "second", "through": "module", "after": LOOKS + 1}),
    }
    refused: dict[str, tuple[str, dict[str, Any]]] = {
        "weighted first": (
            "round 0: optimizer.step() was called after pace.weighted(loss).backward() alone",
            {"how": "weighted first"},
        ),
        "again": ("was stepped twice for one round", {"how": "stepped again without a pass"}),
        "same optimizer": ("was stepped twice for one round", {"how": "same optimizer"}),
        "LBFGS by its own loss": (
            "LBFGS decides by the loss how often it runs its closure, which returned ",
            {"how": "LBFGS by its own loss"},
        ),
        "LBFGS by its own loss, by the hook": (
            "expected the same loss on all: return pace.mean(loss)",
            {"how": "LBFGS by its own loss", "weigh": "hook"},
        ),
    }
    cases = exact | {name: case for name, (_, case) in [*unsummed.items(), *refused.items()]}
    found = run_cases(2, paced, cases)
    for name in exact:
        assert max(found[name]) < 1e-12, name
    for name, (step, _) in unsummed.items():
        for words in found[name]:
            assert (
                f"round {step}: an optimizer would step with gradients of a pace.weighted(loss) that DDP"
                in words
            )
    for name, (expected, _) in refused.items():
        for words in found[name]:
            assert expected in words


def test_gradients_of_a_pass_are_noticed_once_and_never_in_autograd_grad() -> None:
    one, two = (torch.ones(2, requires_grad=True) for _ in range(2))
    noticed: list[tuple[str, bool, bool]] = []

    def note(when: str) -> Callable[[], None]:
        return lambda: noticed.append((when, one.grad is None, two.grad is None))

    hooks = [GradientsOfPass([one, two], note(when), last=when == "last") for when in ("first", "last")]
    loss = (one * two).sum()
    torch.autograd.grad(loss, [one], retain_graph=True)
    torch.autograd.grad(loss, [two, one], create_graph=True)
    assert noticed == []
    loss.backward(retain_graph=True)
    assert [when for when, *_ in noticed] == ["first", "last"]
    assert noticed[0] == ("first", True, True)  # before any gradient is added
    noticed.clear()
    one.sum().backward()  # a pass with only some of the parameters
    assert [when for when, *_ in noticed] == ["first", "last"]
    noticed.clear()
    for hook in hooks:
        hook.remove()
    loss.backward()
    assert noticed == []


def test_gradients_of_a_nested_pass_are_its_own() -> None:
    outer, inner = (torch.ones(2, requires_grad=True) for _ in range(2))
    noticed: list[str] = []
    hooks = [GradientsOfPass([outer, inner], lambda: noticed.append("last"))]
    loss = (outer * 2).sum()

    def nested(_: torch.Tensor) -> None:
        with torch.enable_grad():
            (inner * 3).sum().backward()
        noticed.append("nested")

    outer.register_hook(nested)
    loss.backward()
    assert noticed == ["last", "last", "nested"]
    for hook in hooks:
        hook.remove()
