"""The state of a model with all of its parameters and buffers, also those that its ``state_dict`` leaves out, and
with what the program may have switched in it: which parameters and which modules are trained."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import chain
from typing import Any

import torch


def whole_state(model: torch.nn.Module, keep_vars: bool = False) -> dict[str, Any]:
    """The ``state_dict`` of the model as ``saved``, and the rest, such as non-persistent buffers, as ``unsaved``;
    which parameters require gradients, and which modules are in training mode, by their names.

    keep_vars: give the model's own tensors, as in ``state_dict``.
    """
    saved = model.state_dict(keep_vars=keep_vars)
    named = chain(model.named_parameters(), model.named_buffers())
    rest = {name: each if keep_vars else each.detach() for name, each in named if name not in saved}
    return {
        "saved": saved,
        "unsaved": rest,
        "requires_grad": {name: each.requires_grad for name, each in model.named_parameters()},
        "training": {name: each.training for name, each in model.named_modules()},
    }


def load_whole_state(model: torch.nn.Module, state: Mapping[str, Any]) -> None:
    """Load what ``whole_state`` gave of another rank's model. Buffers that this model has in another shape, as caches
    that grow, are replaced; those that it has not made yet are left out."""
    model.load_state_dict(state["saved"])
    own = dict(chain(model.named_parameters(), model.named_buffers()))
    for name, value in state["unsaved"].items():
        if name not in own:
            continue
        if own[name].shape == value.shape:
            with torch.no_grad():
                own[name].copy_(value)
        else:
            owner, _, buffer = name.rpartition(".")
            setattr(model.get_submodule(owner), buffer, value.to(own[name].device))
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(state["requires_grad"].get(name, parameter.requires_grad))
    modules = list(model.named_modules())  # each before those within it, whose mode it sets, too
    modes = {name: module.training for name, module in modules} | state["training"]
    for name, module in modules:
        module.train(modes[name])
