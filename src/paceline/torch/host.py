"""What a training framework that runs the loop adds to its micro-steps, and what it asks of a ``Pace`` and tells it:
``pace.host``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from paceline.torch.gradients.reducers import Reducer
from paceline.torch.passes import check_loss
from paceline.torch.plan import Piece
from paceline.torch.progress import Progress


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


class Hosting:
    """One Pace's side towards a framework, which runs backward passes and optimizer steps by itself.

    For each micro-step that it is given a batch for: ``weight`` before the backward pass, ``backward_done`` after it;
    ``stepped`` after the optimizer's step of a round that is ``pace.complete``.
    """

    def __init__(self, loop: Any, reducer: Reducer) -> None:
        self._loop, self._reducer = loop, reducer
        # Where the run stands, and the rounds that are left of its epoch.
        self.progress: Progress = loop.progress

    @property
    def adapter(self) -> Host:
        """What the framework adds to each micro-step; set it before the first."""
        return self._loop.host

    @adapter.setter
    def adapter(self, adapter: Host) -> None:
        self._loop.host = adapter

    @property
    def first(self) -> bool:
        """True in a round's first micro-batch."""
        return self._loop.in_round and self._loop.passes.piece.first

    @property
    def last(self) -> bool:
        """True in a round's last micro-batch, whose backward pass reduces the gradients."""
        return self._loop.last

    def weight(
        self, loss: torch.Tensor | None = None, reduction: str = "mean", count: float | None = None
    ) -> float:
        """What this micro-batch's gradient counts: multiply the loss by it. A loss that is given goes on record."""
        if loss is not None:
            check_loss(loss)
        return self._loop.passes.weight(loss, reduction, count)

    def backward_done(self) -> None:
        """The backward pass of this micro-batch is through."""
        self._loop.passes.ended()

    def stepped(self, seconds: float = 0.0) -> None:
        """The round's optimizer step is done and took so long."""
        self._loop.stepped(seconds)

    def end_micro_step(self) -> None:
        """The loop goes on to the next micro-step. Raises PacelineError if it left something out."""
        self._loop.end_micro_step()

    def close_epoch(self) -> None:
        """Every sample of the epoch has been used, and the framework does not ask the loader for one more."""
        self._loop.close_epoch()

    def release(self) -> None:
        """Let go of DDP, whose last work may abort the process at its end. No backward pass may follow."""
        self._reducer.release()
