"""Gradients of parameters outside of the model that come from a round's own loss.

Some options weigh or correct the gradients of the model after they have been computed, and reach no other parameter:
``Weighing.model_only``. And perhaps nothing sums these gradients over the ranks: then each rank trains parameters of
its own, as under plain DDP. A second model with a backward pass of its own is not concerned, such as the generator of
a GAN.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from paceline.torch import timing
from paceline.torch.gradients.reducers import LOOKS
from paceline.torch.hooks_of_torch import running_pass

NEVER = -2  # the number of no pass


class Outside:
    """Whether parameters outside of the model get their gradients in the backward pass that also gives the model's.

    parameters: the model's. passing: whether the running micro-step's backward pass has not ended. expected: of one
    module with all parameters of the loss.

    Attributes:
        second: Whether ``steps_second`` is to be called, as nothing in the run could sum another model's gradients.
    """

    def __init__(
        self,
        parameters: Sequence[torch.nn.Parameter],
        passing: Callable[[], bool],
        expected: str = "wrapped once and given to Pace, or a DistributedDataParallel of their own",
        second: bool = False,
    ) -> None:
        self.second = second
        self._parameters, self._passing, self._expected = parameters, passing, expected
        self._left = LOOKS  # then the hooks go, which cost time: this mistake is made from the beginning
        self._own = -1  # torch's number of the newest pass of a round's loss
        # By identity, the number of the pass that last gave a parameter a gradient.
        self._newest: dict[int, int] = {}
        self._hooks: list[Any] = []
        self._moved: dict[int, weakref.ref[torch.nn.Parameter]] = {}  # by identity, those to be compared
        self._reports = LOOKS  # in which ranks compare them, from the first one on

    @property
    def looks(self) -> bool:
        """Whether further steps are looked at."""
        return self._left > 0

    def moved(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        """These are about to move by gradients of a round's loss."""
        if self._reports:
            self._moved.update({id(p): weakref.ref(p) for p in parameters if type(p) is torch.nn.Parameter})

    def number(self) -> float:
        """A number made from the values of those that have ``moved``, to be compared between ranks; 0 if none."""
        if not (self._moved and self._reports):
            return 0.0
        self._reports -= 1
        there = [p for ref in self._moved.values() if (p := ref()) is not None]
        return sum(float(p.detach().double().square().sum()) for p in there)

    def differ(self, step: int) -> None:
        """The ranks' numbers differ before round ``step``: warns, once."""
        if not self._reports:
            return
        self._reports, self._moved = 0, {}
        warnings.warn(
            f"round {step}: parameters of the loss outside of the model differ between ranks: nothing sums their "
            "gradients, so that each rank trains its own; expected one module with all parameters of the loss, "
            f"{self._expected}, unless they are to differ",
            RuntimeWarning,
            stacklevel=timing.level(),
        )

    def steps_second(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        """A step of another model's parameters begins: warns, once, if some have a gradient."""
        if all(p.grad is None for p in parameters):
            return
        self.second = False
        warnings.warn(
            "an optimizer steps parameters that are not of the model, and nothing sums their gradients: each rank "
            "trains its own; expected one module with the parameters of both models, or Pace with a "
            "DistributedDataParallel of each",
            RuntimeWarning,
            stacklevel=timing.level(),
        )

    def look(self, parameters: Iterable[torch.nn.Parameter]) -> torch.nn.Parameter | None:
        """One of the ``parameters`` whose gradient came in the newest pass of a round's loss. Those that are given
        for the first time are looked at in the passes that follow."""
        if not self._left:
            return None
        self._left -= 1
        if not self._hooks:
            self._hook(self._parameters, self._ours)
        for parameter in parameters:
            if (newest := self._newest.get(id(parameter))) is None:
                self._newest[id(parameter)] = NEVER
                self._hook([parameter], self._theirs)
            elif newest == self._own:
                return parameter
        if not self._left:
            self.close()
        return None

    def close(self) -> None:
        """Look at no more parameters."""
        self._left = 0
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def _hook(self, parameters: Iterable[torch.nn.Parameter], notify: Callable[[torch.Tensor], None]) -> None:
        self._hooks += [p.register_post_accumulate_grad_hook(notify) for p in parameters if p.requires_grad]

    def _ours(self, _: torch.Tensor) -> None:
        if self._passing():
            self._own = running_pass()

    def _theirs(self, parameter: torch.Tensor) -> None:
        self._newest[id(parameter)] = running_pass()
