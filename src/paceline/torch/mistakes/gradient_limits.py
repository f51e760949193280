"""Finds hooks of the program that limit the gradients of single parameters, such as a clamp.

Such a hook sees the gradient of one rank, times the weight of its loss. Hooks that are linear, such as masks, are
exact under any weights, and hooks that only look change nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from paceline.torch import hooks_of_torch

PASSES = 8  # in which a parameter is watched
APART = 1.5  # ratio of two gradients that became equal, beyond what rounding does


class GradientLimits:
    """Watches the gradients of parameters that have hooks, in their first passes for which ``counts`` is true.

    found: called once with a parameter whose gradient is limited.
    """

    def __init__(
        self,
        parameters: Iterable[torch.nn.Parameter],
        counts: Callable[[], bool],
        found: Callable[[torch.Tensor], None],
    ) -> None:
        self.counts, self._found = counts, found
        trained = (each for each in parameters if each.requires_grad)
        self._watches = [_Watch(each, self) for each in trained if hooks_of_torch.has_hooks(each)]

    def limited(self, parameter: torch.Tensor) -> None:
        """The program's hooks limit the gradient of this parameter."""
        self.close()
        self._found(parameter)

    def close(self) -> None:
        """Watch no more."""
        for watch in self._watches:
            watch.close()


class _Watch:
    """The gradient of one parameter before and after the program's hooks."""

    def __init__(self, parameter: torch.nn.Parameter, owner: GradientLimits) -> None:
        self._parameter, self._owner, self._left = parameter, owner, PASSES
        self._before: torch.Tensor | None = None
        # The norms of the newest gradient that was changed, before and after it.
        self._norms: tuple[float, float] | None = None
        self._hooks: list[Any] = [
            hooks_of_torch.first_hook(parameter, self._given),
            parameter.register_hook(self._made),
        ]

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()

    def _given(self, gradient: torch.Tensor) -> None:
        dense = type(gradient) is torch.Tensor and gradient.layout == torch.strided
        watched = dense and self._left and self._owner.counts()
        self._before = gradient.detach().clone() if watched else None

    def _made(self, gradient: torch.Tensor) -> None:
        before, self._before = self._before, None
        if before is None:
            return
        self._left -= 1
        after = gradient.detach()
        norms = (float(before.norm()), float(after.norm())) if bool((before != after).any()) else None
        if norms is not None and (clamped(before, after) or _same_norm(self._norms, norms)):
            self._owner.limited(self._parameter)
        elif not self._left:
            self.close()
        self._norms = norms or self._norms


def clamped(before: torch.Tensor, after: torch.Tensor) -> bool:
    """Whether different elements of a gradient have become the same largest one, as under a clamp or a sign."""
    changed = (after != before) & (after != 0)
    if not bool(changed.any()):
        return False
    top = after[changed].abs().max()
    given = before[changed & (after.abs() == top)].abs()
    return given.numel() > 0 and bool(given.max() > APART * given.min())


def _same_norm(first: tuple[float, float] | None, second: tuple[float, float]) -> bool:
    """Whether two gradients of different norms have become such of the same norm."""
    if first is None or not (first[1] and second[1]):
        return False
    low, high = sorted((first[0], second[0]))
    return high > APART * low and abs(first[1] - second[1]) <= 1e-4 * first[1]
