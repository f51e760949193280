"""The closure of LBFGS, which decides by the returned loss how often it runs it: as often on every rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from paceline.errors import PacelineError
from paceline.torch import peers


def closure_of(arguments: Any, named: Any) -> Callable[..., Any] | None:
    """The closure among the arguments of an optimizer's step, of which torch passes the optimizer as the first."""
    found: Callable[..., Any] | None = named.get("closure") if len(arguments) < 2 else arguments[1]
    return found


def with_same_losses(optimizer: torch.optim.Optimizer, arguments: Any, named: Any) -> Any:
    """The step's arguments, positional and named, with a closure that raises PacelineError on all ranks where the
    loss that it returns differs between them; None for a step that runs its closure once."""
    closure = closure_of(arguments, named)
    if closure is None or peers.ranks() == 1 or not _repeats(optimizer):
        return None

    def same(*given: Any) -> Any:
        loss = closure(*given)
        losses = [repr(each) for each in peers.gather(float(loss))]  # NaN is the same as NaN
        if len(set(losses)) > 1:
            raise PacelineError(
                f"{type(optimizer).__name__} decides by the loss how often it runs its closure, which returned "
                f"{', '.join(losses[:2])}{', ...' * (len(losses) > 2)} on the ranks; expected the same loss on all: "
                "return pace.mean(loss) from the closure, or use another optimizer"
            )
        return loss

    if len(arguments) < 2:
        return arguments, {**named, "closure": same}
    return (arguments[0], same, *arguments[2:]), named


def _repeats(optimizer: torch.optim.Optimizer) -> bool:
    """Whether it may run a closure more than once a step."""
    return isinstance(optimizer, torch.optim.LBFGS) and any(
        group["max_iter"] > 1 or group["line_search_fn"] for group in optimizer.param_groups
    )
