"""How a model's gradients are summed where ranks may be lost: not by DistributedDataParallel, but beside it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from paceline.errors import PacelineError
from paceline.torch.gradients.parallel import Alone


class Elastic(Alone):
    """A plain module, or one in a DistributedDataParallel of one rank, which sums nothing.

    begins: called before each backward pass, with whether it is a round's last planned one; set it first.
    """

    counts = True

    def __init__(self, ddp: DistributedDataParallel | None) -> None:
        self._ddp = ddp
        self.begins: Callable[[bool], None] = lambda last: None
        if ddp is not None:
            ddp.require_backward_grad_sync = False

    def no_sync(self) -> AbstractContextManager[Any]:
        return nullcontext()

    def check_sync(self, last: bool) -> None:
        self.begins(last)

    def release(self) -> None:
        if self._ddp is not None:
            self._ddp.reducer = None  # type: ignore[assignment]


def elastic(model: nn.Module) -> Elastic:
    """How ``model`` is summed. Raises PacelineError for what cannot go on without a rank."""
    modules = list(model.modules())
    wrapped = [module for module in modules if isinstance(module, DistributedDataParallel)]
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    wrong = (
        "its gradients are summed by gloo, on processors; the model is on " + str(device)
        if device.type != "cpu"
        else "the model was given to fully_shard, and a rank's part of it would be lost with the rank"
        if any(hasattr(module, "set_requires_gradient_sync") for module in modules)
        else "the DistributedDataParallel module is in a group of several ranks, which one lost rank ends: start the "
        "script with python -m paceline.torch.guard, where each is in a group of its own"
        if any(module.process_group.size() > 1 for module in wrapped)
        else "an embedding has sparse gradients, which are not summed yet; use sparse=False"
        if any(getattr(module, "sparse", False) is True for module in modules)
        else ""
    )
    if wrong:
        raise PacelineError(f"elastic=True: {wrong}")
    return Elastic(wrapped[0] if wrapped else None)
