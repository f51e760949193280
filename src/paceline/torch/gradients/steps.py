"""Hears of every optimizer step in this process that concerns one model, whoever takes it."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from paceline.torch.gradients.put_aside import held

Before = Callable[[torch.optim.Optimizer, bool], None]
After = Callable[[torch.optim.Optimizer], None]


class Steps:
    """before, after: bound methods, called with each optimizer that holds one of the parameters; held weakly, since
    torch keeps its hooks for as long as the process lives. ``before`` is also told whether the step has a closure,
    which runs the backward pass within the step."""

    def __init__(self, parameters: Iterable[torch.nn.Parameter], before: Before, after: After) -> None:
        self._ours = {id(p) for p in parameters}
        self._hooks: list[Any] = [
            register_optimizer_step_pre_hook(self._telling(before, True)),
            register_optimizer_step_post_hook(self._telling(after, False)),
        ]

    def concern(self, optimizer: torch.optim.Optimizer) -> bool:
        """True when the optimizer holds one of the parameters."""
        return any(id(p) in self._ours for p in held(optimizer))

    def close(self) -> None:
        """Hear of no more steps."""
        for hook in self._hooks:
            hook.remove()

    def _telling(self, listener: Callable[..., None], of_closure: bool) -> Callable[..., None]:
        weak = weakref.WeakMethod(listener)
        ours = self._ours

        def tell(optimizer: torch.optim.Optimizer, arguments: Any, named: Any) -> None:
            method = weak()
            if method is None or not any(id(p) in ours for p in held(optimizer)):
                return
            if of_closure:
                # torch's wrapper puts the optimizer itself first
                given = [*(a for a in arguments if a is not optimizer), named.get("closure")]
                method(optimizer, any(a is not None for a in given))
            else:
                method(optimizer)

        return tell
