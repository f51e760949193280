"""The whole state of a model: also what its ``state_dict`` leaves out."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from paceline.torch.whole_state import load_whole_state, whole_state


class Features(nn.Module):
    """Random features that are not saved, and a cache that grows."""

    def __init__(self, seed: int, cached: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.head = nn.Linear(3, 1)
        self.register_buffer("projection", torch.randn(2, 3), persistent=False)
        self.inner = nn.Module()
        self.inner.register_buffer("cache", torch.randn(cached) if cached else None, persistent=False)


class Filtered(Features):
    """Saves only its head."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed, 2)
        self.frozen = nn.Parameter(torch.randn(2), requires_grad=False)

    def state_dict(self, *given: Any, **named: Any) -> Any:
        return {name: each for name, each in super().state_dict(*given, **named).items() if "head" in name}

    def load_state_dict(self, state: Any, strict: bool = True, assign: bool = False) -> Any:
        return super().load_state_dict(state, strict=False)


def tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


@pytest.mark.parametrize(
    ("mine", "theirs"),
    [
        (Features(0), Features(1)),
        (Features(0, 4), Features(1, 4)),
        (Features(0, 4), Features(1, 7)),  # the other has cached more
        (Filtered(0), Filtered(1)),
    ],
)
def test_loaded_model_has_all_tensors_of_the_other(mine: nn.Module, theirs: nn.Module) -> None:
    own = tensors(mine)
    load_whole_state(mine, whole_state(theirs))
    for name, each in tensors(theirs).items():
        assert torch.equal(tensors(mine)[name], each)
        assert tensors(mine)[name] is not each
        assert own[name].shape != each.shape or tensors(mine)[name] is own[name], "optimizers hold it"


def test_what_the_other_has_frozen_and_put_into_evaluation_is_so_here() -> None:
    mine, theirs = Features(0), Features(1)
    theirs.head.bias.requires_grad_(False)
    theirs.inner.eval()
    load_whole_state(mine, whole_state(theirs))
    assert (mine.head.weight.requires_grad, mine.head.bias.requires_grad) == (True, False)
    assert [module.training for module in mine.modules()] == [True, True, False]


def test_cache_that_this_model_has_not_made_is_left_out() -> None:
    mine = Features(0)
    load_whole_state(mine, whole_state(Features(1, 7)))
    assert mine.inner.cache is None


def test_own_tensors_are_given_if_asked_for() -> None:
    model = Features(0, 4)
    state = whole_state(model, keep_vars=True)
    given = {**state["saved"], **state["unsaved"]}
    assert {*map(id, tensors(model).values())} == {*map(id, given.values())}
    assert not any(each.requires_grad for each in whole_state(model)["saved"].values())
