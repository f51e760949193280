"""Backward passes that are not Paceline's: their gradients carry no weight, so no step may be taken with them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from paceline.errors import PacelineError
from paceline.torch import hooks_of_torch
from paceline.torch.gradients.reducers import LOOKS
from paceline.torch.mistakes import Check, Words
from paceline.torch.plan import Piece


class _Seen:
    """What happened to the model. A class, so that its hooks can be copied and pickled with the model.

    Attributes:
        open: There was a forward pass, and no loss was weighted since.
        foreign: A backward pass has left a gradient all the same.
    """

    open = foreign = False

    def through(self, *_: Any) -> None:
        """The hook after a forward pass; one within a backward pass recomputes activations."""
        if torch.is_grad_enabled() and (torch.compiler.is_compiling() or hooks_of_torch.running_pass() < 0):
            self.open = True

    def weighted(self, *_: Any) -> None:
        """A loss gets its weight; also the hook of such a loss, when its backward pass begins."""
        self.open = False

    def used(self, _: torch.Tensor) -> None:
        """The hook after a parameter's gradient."""
        self.foreign = self.foreign or self.open

    def checked(self) -> None:
        """No gradient of another pass is in the model."""
        self.foreign = False


class ForeignPasses(Check):
    """Finds the backward pass of a loss without a weight, after a forward pass through the model.

    Hooks on each parameter cost time, so it looks at some rounds of the first iteration, and at the first round of
    each later one: this mistake is made from the beginning, or from an epoch on.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        parameters: Iterable[torch.nn.Parameter],
        words: Callable[[], Words],
    ) -> None:
        self._model, self._parameters = model, list(parameters)
        self._words = words
        self._seen, self._handles = _Seen(), list[Any]()
        self._left = 0  # rounds that are still looked at, and the one after them
        self._rounds = LOOKS  # to be looked at in the next iteration

    def iteration(self, step: int) -> None:
        if not self._left:
            self._left, self._rounds = self._rounds + 1, 1
            seen = self._seen
            self._handles = [self._model.register_forward_hook(seen.through)]
            # Those that are trained now: the program may have frozen some.
            trained = (p for p in self._parameters if p.requires_grad)
            self._handles += [p.register_post_accumulate_grad_hook(seen.used) for p in trained]

    def weighs(
        self, loss: torch.Tensor | None, piece: Piece, reduction: str, count: float | None, first: bool
    ) -> bool:
        self._seen.weighted()
        if loss is not None and loss.requires_grad:
            loss.register_hook(self._seen.weighted)  # its backward pass may come after another forward pass
        if first:
            self._seen.checked()
            if piece.last:
                self._left -= 1
                if not self._left:
                    self._forget()
        return self._left > 0

    def steps(self, piece: Piece) -> None:
        """Raises PacelineError if the round has a gradient without a weight beside one with a weight."""
        if self._seen.foreign:
            raise PacelineError(
                f"round {piece.step}: a loss.backward() without a weight followed the weighted one; expected "
                + self._words().backward
            )

    def close(self) -> None:
        self._left = 0
        self._forget()

    def _forget(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []
