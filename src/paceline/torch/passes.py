"""The backward passes of a loop's turns: what each one's gradient counts, and when a round's last is ready."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from paceline.errors import PacelineError, short
from paceline.torch.gradients.last import LastGradient
from paceline.torch.gradients.parallel import Alone, weigh_in_hook
from paceline.torch.gradients.weighing import Weighing
from paceline.torch.measuring.meter import Meter
from paceline.torch.plan import Piece
from paceline.torch.terms import Terms


class Turn:
    """One turn of the loop, from what it is given to the end of its round or the next turn."""

    __slots__ = ("begun", "done", "piece", "weighed")

    def __init__(self, piece: Piece) -> None:
        self.piece = piece
        self.weighed = False  # its loss
        self.begun = False  # its backward pass
        self.done = False


class Passes:
    """For each turn ``begin``, then ``weight`` before its backward pass and ``ended`` after it, of both of which DDP
    tells under the hook. ``turn`` is None again when the round is over or left.

    halfway: called with the running piece when its backward pass begins; ready: when the last gradient of a round's
    last piece is there, perhaps several times.
    """

    def __init__(
        self,
        parameters: Sequence[torch.nn.Parameter],
        device: torch.device,
        parallel: Alone,
        terms: Terms,
        meter: Meter,
        halfway: Callable[[Piece], None],
        ready: Callable[[Piece], None],
    ) -> None:
        self.turn: Turn | None = None  # that is running
        # Called after each backward pass: the piece as it stands, the last one only if the round is complete.
        self.summed: Callable[[Piece], Piece] = _as_planned
        self._meter, self._halfway, self._ready = meter, halfway, ready
        self._by_hook = terms.weigh == "hook"
        self._parallel, self._on_cpu = parallel, device.type == "cpu"
        self.gradients = Weighing(
            parameters,
            device,
            parallel,
            by_hook=self._by_hook,
            exact=bool(terms.cell) and not parallel.counts,  # which sums without rounding by itself
            counted=meter.counted_by_all,
        )
        self._hooks: list[Any] = []
        self._last: LastGradient | None = None  # else ``ended`` is early enough
        if parallel.waits != "never" or self._by_hook:
            self._last = LastGradient(parameters, self._gradients_ready)
            self._hooks.append(self._last)
        if self._by_hook:
            parallel.register_comm_hook(self._hook_weight, weigh_in_hook)
            hook = torch.autograd.graph.register_multi_grad_hook
            self._hooks.append(hook(parameters, self._backward_begins, mode="any"))

    @property
    def piece(self) -> Piece:
        """What the running turn is given. Raises PacelineError between rounds."""
        if self.turn is None:
            raise PacelineError("no round is running; expected this within `for ... in pace.loader(...)`")
        return self.turn.piece

    @property
    def complete(self) -> bool:
        """True when the round's gradients are all in, and an optimizer step is due."""
        turn = self.turn
        return turn is not None and turn.done and self._meter.stopped and turn.piece.last

    def begin(self, piece: Piece) -> None:
        """A batch goes to the loop."""
        self.gradients.begin(piece)
        self.turn = Turn(piece)

    def check_due(self, loss: Any) -> None:
        """Raises PacelineError if the loss is no tensor, or this turn's backward pass has been taken already."""
        _check_loss(loss)
        if self.turn is not None and self.turn.done:
            raise PacelineError(
                f"round {self.turn.piece.step}: pace.backward() was called twice in one turn of the loop; expected "
                "once: add the losses, and call it with the sum"
            )

    def begins(self, loss: torch.Tensor) -> None:
        """A backward pass through this loss follows at once, on this thread."""
        if self._last is None or self.turn is None or not self.turn.piece.last:
            return
        # On a device a pass is through long before its gradients are, and hooks tell on which stream these will be.
        if self._on_cpu and self._parallel.waits == "behind":
            self._last.begins(loss)

    def weight(self, loss: torch.Tensor | None, reduction: str, count: float | None) -> float:
        """What this turn's gradient counts; takes the loss, where given, down for the record."""
        turn = self.turn
        if turn is None:
            raise PacelineError("pace.backward() was called outside of `for ... in pace.loader(...)`")
        if reduction not in ("mean", "sum"):
            raise PacelineError(f"reduction={reduction!r}: expected 'mean' or 'sum'")
        if loss is not None:
            _check_loss(loss)
        piece = turn.piece
        many = piece.samples if count is None else count * (piece.samples > 0)
        if count is not None and not turn.weighed:
            self._meter.add_count(many)
        part = many if reduction == "mean" else float(many > 0)
        if loss is not None:
            self._meter.add_loss(loss, part)
        if not piece.last:
            self._halfway(piece)
        if not self._by_hook:
            self.gradients.check_sync(piece)
        if not turn.weighed:
            turn.weighed = True
            self.gradients.weigh(piece, None if count is None else many)
        if self._by_hook:  # which weighs means
            if count is not None and not many:
                return 0.0
            return 1.0 / max(many, 1) if reduction == "sum" else 1.0
        turn.begun = True
        return self.gradients.weight(piece, part)

    def ended(self) -> None:
        """The backward pass of this turn is through."""
        turn = self.turn
        piece = self.piece if turn is None else turn.piece  # which raises between rounds
        assert turn is not None
        if not (turn.begun or self._by_hook):
            raise PacelineError(
                f"round {piece.step}: pace.backward_done() was called before pace.weight(loss); expected the loss to "
                "be multiplied by that weight first"
            )
        turn.done = True
        turn.piece = piece = self.summed(piece)
        if piece.last:
            if self._last is not None:
                self._last.ended()
            if not self._meter.stopped:  # for a graph in which no hooked parameter took part
                self._ready(piece)
        self.gradients.done(piece)

    def check_taken(self) -> None:
        """Raises PacelineError where the turn is over, and its backward pass was left out."""
        if self.turn is None:
            return  # the round was finished by step()
        piece = self.turn.piece
        if not self.turn.done:
            how = "loss.backward()" if self._by_hook else "pace.backward(loss)"
            raise PacelineError(
                f"round {piece.step}: the loop went on without {how}; call it once for each micro-batch that the "
                "loader yields"
            )
        if piece.last and not self._meter.stopped:
            raise PacelineError(f"round {piece.step}: the loop went on without a backward pass")

    def check_complete(self) -> None:
        """Raises PacelineError where a step is taken that is not due."""
        turn = self.turn
        if turn is None or (turn.done and self._meter.stopped and turn.piece.last):
            return
        step = turn.piece.step
        others = self._meter.stopped or (not turn.weighed and self.gradients.there())
        if turn.piece.last and not turn.done and others:
            raise PacelineError(
                f"round {step}: optimizer.step() was called after a backward pass that is not Paceline's, "
                "whose gradient is not weighed; call pace.backward(loss) in its place"
            )
        raise PacelineError(
            f"optimizer.step() was called within round {step}, before all its gradients were there; "
            "expected pace.step(optimizer), which steps when the round is complete"
        )

    def close(self) -> None:
        """Let go of the model."""
        self.gradients.release()
        for hook in self._hooks:
            hook.remove()

    # -- what torch calls ------------------------------------------------------------------------------------

    def _hook_weight(self) -> float:
        return self.gradients.share(self.piece)

    def _backward_begins(self, _: object) -> None:
        """Under the hook, nothing else tells of a backward pass."""
        turn = self.turn
        if turn is None or turn.begun:
            return
        turn.begun = True
        self._halfway(turn.piece)
        self.gradients.check_sync(turn.piece)
        self.gradients.gather(turn.piece)
        # as soon as the whole pass is through, and with it DDP's reduction
        torch.autograd.Variable._execution_engine.queue_callback(self._backward_ended)

    def _backward_ended(self) -> None:
        if self.turn is not None:
            self.turn.done = True
            self.gradients.gathered(self.turn.piece)

    def _gradients_ready(self) -> None:
        if self.turn is not None and self.turn.piece.last:
            self._ready(self.turn.piece)


def _check_loss(loss: Any) -> None:
    if not isinstance(loss, torch.Tensor):
        hint = "the entry that holds it" if isinstance(loss, dict) else "what the criterion returned"
        raise PacelineError(f"the loss is {short(loss)}; expected a tensor: hand over {hint}")


def _as_planned(piece: Piece) -> Piece:
    return piece
