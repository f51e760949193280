"""Hooks on parameters that limit a rank's weighted gradients are warned of; linear hooks are exact, and silent."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from paceline.torch import Pace
from paceline.torch.mistakes.gradient_limits import clamped
from support.guarantees import guarantee
from support.ranks import run_ranks
from support.scripted import Script
from support.small_net import Samples, fresh, optimizer_of

pytestmark = pytest.mark.processes

UNEVEN, EVEN = Script(((5, 2), (1, 6), (3, 3), (1, 9))), Script(((1, 1),))
Hook = Callable[[torch.Tensor], torch.Tensor | None]
LIMITING: dict[str, Hook] = {
    "clamp": lambda g: g.clamp(-0.01, 0.01),
    "sign": torch.sign,
    "norm": lambda g: g * (1e-3 / g.norm()),
}
LINEAR: dict[str, Hook] = {
    "look": lambda g: None,
    "mask": lambda g: g * (torch.arange(g.numel()).reshape(g.shape) % 2),
    "scale": lambda g: 0.3 * g,
    "centred": lambda g: g - g.mean(),
}


def trained(rank: int, ranks: int, name: str, policy: Any, weigh: str) -> tuple[list[str], list[Any]]:
    """The warnings, and the parameters after two epochs of six rounds."""
    model = fresh(torch.float64)
    for parameter in model.parameters():
        parameter.register_hook((LIMITING | LINEAR)[name])
    ddp, optimizer = DistributedDataParallel(model), optimizer_of(model)
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        pace = Pace(ddp, 16, policy, weigh=weigh)
        for _ in range(2):
            for x, y, _ in pace.loader(Samples(96), seed=5):
                loss = nn.functional.cross_entropy(ddp(x), y)
                loss.backward() if weigh == "hook" else pace.backward(loss)
                pace.step(optimizer)
        pace.host.detach()
    assert all(len(p._backward_hooks or ()) == 1 for p in model.parameters())  # that of the program
    return [str(one.message) for one in heard], [p.detach().tolist() for p in model.parameters()]


@guarantee(
    "A hook on a parameter that limits its gradient, such as a clamp, causes one warning where loads differ."
)
@pytest.mark.parametrize("name", LIMITING)
def test_hook_that_limits_a_gradient_warns_once(name: str) -> None:
    for said, _ in run_ranks(2, trained, name, UNEVEN, "loss"):
        assert ["limits its gradient" in one for one in said] == [True], said
        assert "clip_grad_value_" in said[0]


@pytest.mark.parametrize("name", LINEAR)
def test_linear_hook_is_exact_and_does_not_warn(name: str) -> None:
    (said, ours), (others, _) = run_ranks(2, trained, name, UNEVEN, "loss")
    assert said == others == []
    _, alone = run_ranks(2, trained, name, EVEN, "loss")[0]
    assert all(
        torch.allclose(torch.tensor(a), torch.tensor(b), atol=1e-12) for a, b in zip(ours, alone, strict=True)
    )


@pytest.mark.parametrize(("policy", "weigh"), [(EVEN, "loss"), (UNEVEN, "hook")])
def test_hook_that_sees_what_it_sees_under_ddp_does_not_warn(policy: Any, weigh: str) -> None:
    assert [said for said, _ in run_ranks(2, trained, "clamp", policy, weigh)] == [[], []]


def test_gradient_that_is_not_finite_is_no_clamp_and_no_error() -> None:
    before = torch.tensor([1.0, 2.0, 3.0])
    assert not clamped(before, torch.tensor([1.0, float("nan"), 0.5]))
    assert not clamped(before, torch.full((3,), float("nan")))
    assert clamped(before, torch.tensor([0.5, 0.5, 0.5]))
