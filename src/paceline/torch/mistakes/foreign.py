"""Backward passes that are not Paceline's: their gradients carry no weight, so no step may be taken with them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from paceline.errors import PacelineError
from paceline.torch import hooks_of_torch
from paceline.torch.gradients.reducers import LOOKS
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


class ForeignPasses:
    """Finds the backward pass of a loss without a weight, after a forward pass through the model.

    Hooks on each parameter cost time, so it looks at some rounds of the first iteration, and at the first round of
    each later one: this mistake is made from the beginning, or from an epoch on.

    Attributes:
        left: Rounds that are still looked at, and the one after them.
    """

    def __init__(self, model: torch.nn.Module, parameters: Iterable[torch.nn.Parameter]) -> None:
        self._model, self._parameters = model, [p for p in parameters if p.requires_grad]
        self._seen, self._handles, self.left, self._never = _Seen(), list[Any](), 0, False
        self._look(LOOKS)

    def never(self) -> None:
        """Every backward pass is weighted, so none is foreign."""
        self._never = True
        self._forget()

    def again(self) -> None:
        """An iteration begins."""
        if not (self.left or self._never):
            self._look(1)

    def weighs(self, first: bool, last: bool) -> None:
        """A loss gets its weight. first: it is the first one of its micro-step, where the gradients in the model are
        checked otherwise. last: the micro-step is the round's last."""
        self._seen.weighted()
        if first:
            self._seen.checked()
            if last:
                self.left -= 1
                if not self.left:
                    self._forget()

    def announced(self, loss: torch.Tensor) -> None:
        """The backward pass of this weighted loss may come after another forward pass."""
        if loss.requires_grad:
            loss.register_hook(self._seen.weighted)

    def check(self, piece: Piece) -> None:
        """Raises PacelineError if the round of ``piece`` has a gradient without a weight beside one with a weight."""
        if self._seen.foreign:
            raise PacelineError(
                f"round {piece.step}: a loss.backward() without a weight followed the weighted one; expected "
                "pace.backward(loss) with the sum of the losses, or with Pace also pace.weighted(loss).backward() "
                "for a further forward pass"
            )

    def close(self) -> None:
        """Remove all hooks from the model."""
        self.never()

    def _look(self, rounds: int) -> None:
        self.left = rounds + 1
        seen = self._seen
        self._handles = [self._model.register_forward_hook(seen.through)]
        self._handles += [p.register_post_accumulate_grad_hook(seen.used) for p in self._parameters]

    def _forget(self) -> None:
        self.left = 0
        for handle in self._handles:
            handle.remove()
        self._handles = []
