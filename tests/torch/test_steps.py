"""Steps that are not due: each is refused in a sentence before it is taken, also where it would change nothing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

from paceline.errors import PacelineError
from paceline.torch import Pace
from paceline.torch.feed.pieces import Order
from support.guarantees import guarantee
from support.small_net import Net, Samples, difference, fresh

GUARANTEES = (
    "A loop with a line left out, doubled, swapped or replaced (101 cases) trains the same model or "
    "raises before the step.",
)

MicroStep = Callable[[Pace, torch.optim.Optimizer, torch.Tensor], object]


def zeroed_before(pace: Pace, optimizer: torch.optim.Optimizer, loss: torch.Tensor) -> None:
    pace.backward(loss)
    optimizer.zero_grad()
    pace.step(optimizer)


def own_and_paces(pace: Pace, optimizer: torch.optim.Optimizer, loss: torch.Tensor) -> None:
    pace.backward(loss)
    optimizer.step()
    pace.step(optimizer)


def paces_and_own(pace: Pace, optimizer: torch.optim.Optimizer, loss: torch.Tensor) -> None:
    pace.backward(loss)
    pace.step(optimizer)
    optimizer.step()


def own_twice(pace: Pace, optimizer: torch.optim.Optimizer, loss: torch.Tensor) -> None:
    pace.backward(loss)
    optimizer.step()
    optimizer.step()


def before_the_pass(pace: Pace, optimizer: torch.optim.Optimizer, loss: torch.Tensor) -> None:
    optimizer.step()
    pace.backward(loss)


def own_each_turn(pace: Pace, optimizer: torch.optim.Optimizer, loss: torch.Tensor) -> None:
    pace.backward(loss)
    optimizer.step()


@pytest.mark.parametrize(
    ("micro_step", "options", "words", "steps"),
    [
        (zeroed_before, {}, "the gradients were zeroed between pace.backward", 0),
        (own_and_paces, {}, "an optimizer was stepped twice for one round", 1),
        (paces_and_own, {}, "an optimizer was stepped twice for one round", 1),
        (own_twice, {}, "an optimizer was stepped twice for one round", 1),
        (before_the_pass, {}, "before all its gradients were there", 0),
        (own_each_turn, {"loop": "pieces", "micro_batch": 3}, "before all its gradients were there", 0),
    ],
)
def test_a_step_that_is_not_due_is_refused(
    micro_step: MicroStep, options: dict[str, Any], words: str, steps: int
) -> None:
    model, loss_of = fresh(torch.float64), nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    taken: list[None] = []
    optimizer.register_step_post_hook(lambda *_: taken.append(None))
    pace = Pace(model, 8, "equal", **options)

    def loop() -> None:
        for x, y, _ in pace.loader(Samples(24), seed=5):
            micro_step(pace, optimizer, loss_of(model(x), y))

    with pytest.raises(PacelineError, match=words):
        loop()
    pace.host.abandon()
    pace.host.detach()
    assert len(taken) == steps


@dataclass
class Wrapped:
    """An optimizer of one's own around one of torch, as libraries have them: a dataclass cannot be hashed."""

    inner: torch.optim.Optimizer

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self.inner.param_groups

    def step(self) -> None:
        self.inner.step()

    def zero_grad(self) -> None:
        self.inner.zero_grad()


def test_an_optimizer_around_one_of_torch_is_stepped_and_what_it_steps_is_checked() -> None:
    model, loss_of = fresh(torch.float64), nn.CrossEntropyLoss()
    model.second.bias.requires_grad_(False)
    optimizer = Wrapped(torch.optim.SGD(model.parameters(), lr=0.1))
    pace = Pace(model, 8, loop="round", deterministic=True)

    def loop() -> None:
        for batch in pace.loader(Samples(24), seed=5):
            pace.round(batch, lambda x, y, _: loss_of(model(x), y))
            pace.step(optimizer)  # type: ignore[arg-type]
            model.second.bias.requires_grad_(True)

    with pytest.raises(PacelineError, match=r"would move second\.bias, which was not trained"):
        loop()
    assert pace.rounds == 1
    pace.host.detach()


@guarantee(
    "A layer that is unfrozen or added in a run raises with its name; the ways that the message names train "
    "the model of one process."
)
def test_one_process_trains_parameters_that_were_frozen_at_first() -> None:
    """Also in several pieces, and by an optimizer that has only these."""
    paced, plain = fresh(torch.float64), fresh(torch.float64)
    data, loss_of = Samples(48), nn.CrossEntropyLoss()
    order = torch.from_numpy(Order(48, 5).epoch(0))

    def start(model: nn.Module) -> tuple[nn.Parameter, list[torch.optim.Optimizer]]:
        late, *others = model.parameters()
        late.requires_grad_(False)
        return late, [torch.optim.SGD([late], lr=0.2, momentum=0.9), torch.optim.SGD(others, lr=0.1)]

    late, optimizers = start(paced)
    with Pace(paced, 8, "equal", loop="round", micro_batch=3) as pace:
        for number, batch in enumerate(pace.loader(data, seed=5)):
            late.requires_grad_(number >= 2)
            pace.round(batch, lambda x, y, _: loss_of(paced(x), y))
            pace.step(optimizers[number < 2 :])
    late, optimizers = start(plain)
    for number, chosen in enumerate(order.split(8)):
        late.requires_grad_(number >= 2)
        loss_of(plain(data.x[chosen]), data.y[chosen]).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for ours, theirs in zip(paced.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)


def actor_and_critic(model: Net) -> list[torch.optim.Optimizer]:
    """Two optimizers that share the first layer."""
    return [
        torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
        torch.optim.SGD(model.first.parameters(), lr=0.05),
    ]


def layer_by_layer(model: Net) -> list[torch.optim.Optimizer]:
    """Two optimizers that share nothing."""
    return [torch.optim.SGD(layer.parameters(), lr=0.1) for layer in (model.first, model.second)]


Steps = Callable[[Pace, list[torch.optim.Optimizer]], object]


def in_one_call(pace: Pace, optimizers: list[torch.optim.Optimizer]) -> None:
    pace.step(optimizers)


def one_by_one(pace: Pace, optimizers: list[torch.optim.Optimizer]) -> None:
    for one in optimizers:
        pace.step(one)


def second_by_itself(pace: Pace, optimizers: list[torch.optim.Optimizer]) -> None:
    first, second = optimizers
    pace.step(first)
    second.step()
    second.zero_grad()


def first_by_itself(pace: Pace, optimizers: list[torch.optim.Optimizer]) -> None:
    first, second = optimizers
    first.step()
    pace.step(second)
    first.zero_grad()


def stepped(steps: Steps, optimizers_of: Callable[[Net], list[torch.optim.Optimizer]]) -> list[nn.Parameter]:
    """The parameters after three rounds."""
    model, loss_of = fresh(torch.float64), nn.CrossEntropyLoss()
    optimizers, pace = optimizers_of(model), Pace(model, 8, "equal")
    try:
        for x, y, _ in pace.loader(Samples(24), seed=5):
            pace.backward(loss_of(model(x), y))
            steps(pace, optimizers)
    finally:
        pace.host.abandon()
        pace.host.detach()
    return [*model.parameters()]


@guarantee(
    "Optimizers that share parameters train as in one process by one `pace.step([first, second])`; one by one they "
    "raise."
)
@pytest.mark.parametrize("steps", [one_by_one, second_by_itself])
def test_optimizers_that_share_parameters_stepped_one_by_one_raise(steps: Steps) -> None:
    with pytest.raises(
        PacelineError, match=r"^round 0: an optimizer shares parameters .*pace\.step\(\[first, second\]\)$"
    ):
        stepped(steps, actor_and_critic)


@guarantee(
    "Optimizers that share parameters train as in one process by one `pace.step([first, second])`; one by one they "
    "raise."
)
@pytest.mark.parametrize(
    ("steps", "optimizers_of"),
    [
        (in_one_call, actor_and_critic),
        (first_by_itself, actor_and_critic),
        (one_by_one, layer_by_layer),
        (second_by_itself, layer_by_layer),
    ],
)
def test_two_optimizers_equal_those_of_one_process(
    steps: Steps, optimizers_of: Callable[[Net], list[torch.optim.Optimizer]]
) -> None:
    plain, data = fresh(torch.float64), Samples(24)
    optimizers = optimizers_of(plain)
    for chosen in torch.from_numpy(Order(24, 5).epoch(0)).split(8):
        plain.zero_grad()
        nn.functional.cross_entropy(plain(data.x[chosen]), data.y[chosen]).backward()
        for optimizer in optimizers:
            optimizer.step()
    assert difference(stepped(steps, optimizers_of), plain.parameters()) < 1e-12
