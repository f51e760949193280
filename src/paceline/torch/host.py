"""The interface between a ``Pace`` and a training framework that runs the loop: ``pace.host``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from paceline.torch import hooks_of_torch
from paceline.torch.gradients.reducers import Reducer
from paceline.torch.mistakes import Words
from paceline.torch.passes import check_loss
from paceline.torch.plan import Piece
from paceline.torch.progress import Progress
from paceline.torch.terms import Terms


class Host:
    """The calls to a framework: an adapter overrides those that it needs, and sets ``pace.host.adapter``.

    This base class is the host of a user's own loop, and does nothing.

    Attributes:
        words: What messages about a loss name.
    """

    words = Words()

    def place(self, batch: Any) -> Any:
        """The batch as the loop gets it; a host moves it to its device."""
        return batch

    def micro_step_begins(self, piece: Piece) -> None:
        """A micro-step is about to run this piece."""

    def iteration_over(self) -> None:
        """The loop over a loader has ended, or was left."""

    def step_begins(self, piece: Piece | None) -> None:
        """An optimizer of the model is about to step, called by Pace, the framework or the user. A PacelineError
        refuses the step. piece: that of the running micro-step, None if no round is running."""

    def step_ended(self, seconds: float) -> None:
        """The step has ended after ``seconds``. An adapter whose loop does not call ``pace.step`` calls
        ``pace.host.stepped``."""

    def without_step(self, step: int, ever: bool, finite: Callable[[], bool]) -> str:
        """The error message for a loop that continues after round ``step`` without an optimizer step; "" if that is
        intended.

        ever: an optimizer was stepped in an earlier round. finite: returns whether all gradients are finite.
        """
        if ever or not finite():  # left out on purpose, or by a scaler
            return ""
        return (
            f"round {step}: the loop went on without an optimizer step; expected pace.step(optimizer) "
            "once a round, after pace.backward(loss)"
        )


class Hosting:
    """The calls from a framework, which runs backward passes and optimizer steps by itself, to one Pace.

    In each micro-step it calls ``weight`` before the backward pass and ``backward_done`` after it, and ``stepped``
    after the optimizer's step of a round that is ``pace.complete``.
    """

    def __init__(self, loop: Any, reducer: Reducer, terms: Terms, detach: Callable[[], None]) -> None:
        self._loop, self._reducer, self._detach = loop, reducer, detach
        # The settings that all ranks agree on.
        self.terms = terms
        # The progress of the run, and the rounds that are left of its epoch.
        self.progress: Progress = loop.progress

    @property
    def adapter(self) -> Host:
        """The framework's ``Host``; set it before the first micro-step."""
        return self._loop.host

    @adapter.setter
    def adapter(self, adapter: Host) -> None:
        self._loop.hosted_by(adapter)

    @property
    def in_round(self) -> bool:
        """True from a round's first micro-batch to its optimizer step."""
        return bool(self._loop.in_round)

    @property
    def first(self) -> bool:
        """True in a round's first micro-batch."""
        return self._loop.in_round and self._loop.round.running.first

    @property
    def last(self) -> bool:
        """True in a round's last micro-batch, whose backward pass reduces the gradients."""
        return self._loop.last

    @property
    def piece(self) -> Piece:
        """The samples of the running micro-step: their number, and the first one's place in the epoch's order. Raises
        PacelineError between rounds."""
        return self._loop.round.running

    def weight(
        self, loss: torch.Tensor | None = None, reduction: str = "mean", count: float | None = None
    ) -> float:
        """The weight of this micro-batch's gradient: multiply the loss by it. A loss that is given is recorded."""
        if loss is not None:
            check_loss(loss)
        return self._loop.passes.weight(loss, reduction, count)

    def known(self, what: str) -> None:
        """The program needs no warning of the mistake of this name."""
        self._loop.checks.known(what)

    def prepared(self) -> None:
        """The program runs the coming backward pass within DDP's forward pass, where the framework has made DDP sum
        its gradients, and zeroes gradients itself."""
        self._reducer.prepared()
        self._loop.passes.gradients.accept()

    def backward_done(self) -> None:
        """The backward pass of this micro-batch has ended."""
        self._loop.passes.ended()

    def stepped(self, seconds: float = 0.0) -> None:
        """The round's optimizer step has ended after ``seconds``."""
        self._loop.steps.stepped(seconds)

    def end_micro_step(self) -> None:
        """The loop continues to the next micro-step. Raises PacelineError if the loop left something out."""
        self._loop.end_micro_step()

    def close_epoch(self) -> None:
        """Every sample of the epoch has been used, and the framework does not ask the loader for another batch."""
        self._loop.close_epoch()

    def flush(self) -> None:
        """Collect the ranks' reports on all rounds so far. Collective; the loader does so at the end of an epoch."""
        self._loop.flush()

    def abandon(self) -> None:
        """Leave the running round unfinished, as after an exception; the state is that of the last finished round.
        Its gradients are dropped, and its samples are used again if the epoch continues."""
        self._loop.abandon()

    def detach(self) -> None:
        """Close the callbacks and remove all hooks from the model; the process group stays."""
        self._detach()

    def release(self) -> None:
        """Release DDP, whose last work may abort the process at its end. No backward pass may follow."""
        hooks_of_torch.release(self._reducer.ddp)
