"""What a training framework that runs the loop adds to its micro-steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from paceline.torch.plan import Piece


class Host:
    """The place where a framework takes part: an adapter overrides what it needs, and sets ``pace.host.adapter``.

    As it stands it is the host of a loop of one's own, and does nothing.
    """

    def place(self, batch: Any) -> Any:
        """A batch on its way to the loop; a host moves it to its device."""
        return batch

    def micro_step_begins(self, piece: Piece) -> None:
        """A micro-step is about to run this piece."""

    def iteration_over(self) -> None:
        """The loop over a loader has ended, or was left."""

    def step_begins(self, piece: Piece | None) -> None:
        """An optimizer of the model is about to step, whoever called it. A PacelineError refuses that.

        piece: of the running micro-step, None if no round is under way."""

    def step_ended(self, seconds: float) -> None:
        """It has stepped, and took so long. An adapter whose loop does not call ``pace.step`` calls
        ``pace.host.stepped``."""

    def without_step(self, step: int, ever: bool, finite: Callable[[], bool]) -> str:
        """The loop goes on after round ``step`` was complete, and no optimizer has been stepped: what is wrong with
        that, as a sentence, or "" where it is meant so.

        ever: an optimizer was stepped in a round before. finite: tells whether the gradients hold no infinity or NaN.
        """
        if ever or not finite():  # left out on purpose, or by a scaler
            return ""
        return (
            f"round {step}: the loop went on without an optimizer step; expected pace.step(optimizer) "
            "once a round, behind pace.backward(loss)"
        )
