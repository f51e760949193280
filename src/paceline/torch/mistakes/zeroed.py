"""Gradients that one optimizer's step has zeroed before another optimizer, which shares parameters, has used them."""

from __future__ import annotations

from collections.abc import Sequence
from operator import is_
from typing import Any

from paceline.errors import PacelineError
from paceline.torch.gradients.weighing import GradientStash, held


class SharedParameters:
    """Checks optimizers that are stepped one after the other for one round. gradients: those of the model."""

    def __init__(self, gradients: GradientStash) -> None:
        self._gradients = gradients
        self._apart: list[Any] = []  # optimizers that share no parameter, in the order of their steps

    def check(self, step: int, taken: Sequence[Any], optimizers: Sequence[Any], further: bool) -> None:
        """Raises PacelineError if ``optimizers`` need gradients that were zeroed after the steps of ``taken``, in
        round ``step``. further: another backward pass came after those steps, and may leave some gradients zero."""
        all_of_them = [*taken, *optimizers]
        if len(all_of_them) <= len(self._apart) and all(map(is_, all_of_them, self._apart)):
            return
        before = {id(p) for one in taken for p in held(one)}
        shared = [p for one in optimizers for p in held(one) if id(p) in before]
        if not shared:
            self._apart = all_of_them
        elif not further and self._gradients.removed(shared):
            raise PacelineError(
                f"round {step}: an optimizer shares parameters with one that was stepped before, whose gradients "
                "pace.step() has zeroed; expected both in one call: pace.step([first, second])"
            )
