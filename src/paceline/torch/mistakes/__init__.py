"""Mistakes of a program that would train another model without a message: what finds them.

A file here has a ``Check``, which ``torch/checks.py`` names, or is a part of one.
"""

from __future__ import annotations

import torch

from paceline.torch.plan import Piece


class Check:
    """A check of one loop's program, told of the events of its rounds; by default it does nothing with them."""

    def iteration(self, step: int) -> None:
        """An iteration of the loop begins, with round ``step``."""

    def weighs(
        self, loss: torch.Tensor | None, piece: Piece, reduction: str, count: float | None, first: bool
    ) -> bool:
        """The loss of a piece gets its weight, and its backward pass follows; None for an unknown loss. first: it is
        the first one of its micro-step. Returns whether the check looks at further losses of this iteration."""
        return False

    def steps(self, piece: Piece) -> None:
        """An optimizer is about to use the complete gradients of the round of ``piece``; called while a check looks
        at losses."""

    def close(self) -> None:
        """No more events follow."""
