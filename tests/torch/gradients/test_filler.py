"""The passes of a filler sample: which gradients they leave at zero."""

from __future__ import annotations

import gc
import weakref

import torch

from paceline.torch.gradients.filler import Filler


def loss_of(*parameters: torch.Tensor) -> torch.Tensor:
    return torch.stack([each.square().sum() for each in parameters]).sum()


def two() -> tuple[torch.nn.Parameter, torch.nn.Parameter]:
    return torch.nn.Parameter(torch.ones(2)), torch.nn.Parameter(torch.ones(3))


def left(parameter: torch.Tensor) -> float:
    return 0.0 if parameter.grad is None else float(parameter.grad.sum())


def test_next_pass_adds_zeros_to_the_given_parameters_and_later_ones_count() -> None:
    own, other = two()
    filler = Filler([own])
    filler.begin()
    for expected in (0.0, 4.0):
        loss_of(own, other).backward()
        assert left(own) == expected
    assert left(other) == 12.0
    filler.again()
    loss_of(own, other).backward()
    assert left(own) == 4.0


def test_followed_pass_adds_zeros_to_all_parameters_of_its_loss_once() -> None:
    own, other = two()
    loss = loss_of(own, other)
    Filler([own]).follow(loss)
    for expected in ((0.0, 0.0), (4.0, 6.0)):
        loss.backward(retain_graph=True)
        assert (left(own), left(other)) == expected


def test_pass_left_out_has_no_effect_on_the_next() -> None:
    own, _ = two()
    filler = Filler([own])
    filler.begin()
    filler.end()
    loss_of(own).backward()
    assert left(own) == 4.0


def test_loss_over_all_ranks_counts_with_a_followed_one_in_one_pass() -> None:
    own, _ = two()
    filler = Filler([own])
    filler.begin()
    mean, penalty = loss_of(own), loss_of(own)
    filler.follow(mean)
    filler.counts()
    filler.again()
    (0.0 * mean + penalty).backward()
    assert left(own) == 4.0
    filler.begin()
    loss_of(own).backward()
    assert left(own) == 4.0, "the next filler sample's pass adds zeros again"


def test_followed_loss_is_given_back_at_once() -> None:
    own, _ = two()
    loss = loss_of(own)
    Filler([own]).follow(loss)
    gone = weakref.ref(loss)
    gc.disable()
    try:
        del loss
        assert gone() is None
    finally:
        gc.enable()
