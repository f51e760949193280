"""Mistakes of a program that would train another model without a message: what finds them.

Most files have a ``Check``, which ``checks`` names, or are a part of one; ``outside``, ``zeroed`` and
``learning_rates`` belong to the optimizers' steps, ``diverged`` to the reports.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from paceline.torch.plan import Piece


@dataclass(frozen=True)
class Words:
    """How a program passes what the messages of the checks ask for.

    Attributes:
        count: What to do if a loss is a mean over another number than its samples; {} are examples of two numbers.
        reduction: The form of a loss, {}.
        backward: What is expected instead of a backward pass of the program's own.
        added: What to do if a gradient does not come from the loss.
    """

    count: str = "pass the number that it is a mean over: pace.backward(loss, count={}), or count={}"
    reduction: str = "pace.backward(loss, {!r})"
    backward: str = (
        "pace.backward(loss) with the sum of the losses, or with Pace also pace.weighted(loss).backward() for a "
        "further forward pass"
    )
    added: str = "use Pace(..., weigh='hook'), which weights the gradients"


class Check:
    """A check of one loop's program. It receives the events of its rounds, and by default does nothing with them."""

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

    def known(self, what: str) -> None:
        """The program needs no warning of the mistake of this name: it has had one, or cannot make it."""

    def close(self) -> None:
        """Remove all hooks, and restore what was replaced."""
