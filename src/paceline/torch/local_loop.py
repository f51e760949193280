"""The loop of ranks that step by themselves (LocalSGD), after each backward pass, and merge at intervals."""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from paceline.errors import PacelineError
from paceline.torch import hooks_of_torch
from paceline.torch.gradients.steps import forget_unscaled, learning_rate
from paceline.torch.gradients.weighing import LocalWeighing
from paceline.torch.local_merge import Merges
from paceline.torch.loop import Loop
from paceline.torch.plan import Piece, Source


def _refuse_wrapped(model: torch.nn.Module, *_: Any) -> None:
    """Raises PacelineError before a forward pass through DDP, which would sum gradients in each of a rank's steps."""
    wrapped = hooks_of_torch.running_ddp() is not None
    if wrapped and torch.is_grad_enabled() and dist.get_world_size() > 1:
        raise PacelineError(
            "the model was called through DistributedDataParallel, and with LocalSGD each rank steps by itself; "
            "expected the plain module that LocalSGD was given: model(x) instead of ddp(x)"
        )


class LocalLoop(Loop):
    """A loop in which a round is an interval, and each of its micro-steps is a step of this rank alone."""

    local: Merges
    _gradients: LocalWeighing
    _source: Source | None = None  # source of the running iteration

    def __init__(self, model: torch.nn.Module, *given: Any) -> None:
        super().__init__(model, *given)
        assert self.terms.merge is not None
        self._hook = model.register_forward_pre_hook(_refuse_wrapped)
        self.local = Merges(model, self.terms.merge, self._reducer)

    def abandon(self) -> None:
        """Abandon as the base class does, and restore the parameters of the interval's beginning."""
        if self.in_round:
            self.local.back()
        super().abandon()

    def flush(self) -> None:
        """Flush as the base class does, and between two intervals merge the changes that are on their way."""
        super().flush()
        if not self.in_round and self.local.flights:
            with self.named():
                self.local.take_in(self.progress.rounds - 1)
            self.merged = True

    def close(self) -> None:
        self.local.back()  # now: a failed loop may be left only later, when other code uses the model
        if self.local.flights and not self._failed:
            warnings.warn(
                "the loop ended while changes were on their way (Merge(delay=1)), so each rank has parameters "
                "of its own; call pace.flush() on all ranks after a loop that is left within an epoch",
                RuntimeWarning,
                stacklevel=4,
            )
        self._hook.remove()
        self.local.close()
        super().close()

    def state_dict(self) -> dict[str, Any]:
        if self.local.flights:
            raise PacelineError(
                f"a checkpoint after interval {self.progress.rounds - 1}, whose changes are still on their way "
                "(Merge(delay=1)); expected one if pace.merged, or after pace.flush() on all ranks"
            )
        return super().state_dict()

    def stands(self) -> dict[str, Any]:
        return {
            **super().stands(),
            "every": self.terms.every.state_dict(self.progress.rounds),
            "outer": self.local.outer_state(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.local.forget()  # else leaving a running interval would undo the parameters that were loaded
        if self.in_round:
            self.abandon()
        self.terms.every.load_state_dict(state.get("every"))
        self.local.load_outer(state.get("outer"))

    def step(self, optimizers: list[Any], scaler: Any) -> bool:
        """Take this rank's own step, and merge after an interval's last one. True when the optimizers stepped."""
        local = self.local
        self._steps.check_ours(optimizers)
        piece, many = self.round.steps_alone(), self._gradients.many
        with self.named():
            stepped = self._take(piece, optimizers, scaler, many > 0)
            over = self._merge(piece, many if stepped else 0.0, optimizers)
        self.merged = over and not local.flights
        if over:
            super().stepped(0.0, learning_rate(optimizers))
        return many > 0

    def stepped(self, seconds: float | None, rate: float = math.nan, by: Sequence[Any] = ()) -> None:
        raise PacelineError(
            "LocalSGD is for your own loop, which calls pace.step(optimizer); a framework that steps the "
            "optimizer by itself needs Pace"
        )

    def _merges_all(self) -> bool:
        """Whether the interval merges all changes: without a delay, or if it is known to be its iteration's last."""
        source, progress = self._source, self.progress
        if not self.behind or source is None:
            return True
        if source.number is None:
            return not source.more()
        done = progress.samples_done + self.round.running.batch
        return source.samples is not None and done >= source.samples

    def _open(self, source: Source) -> object:
        self._source = source
        return super()._open(source)

    def _take(self, piece: Piece, optimizers: list[Any], scaler: Any, counts: bool) -> bool:
        """Step the optimizers, if the samples of this piece count; returns whether one of them has stepped."""
        stepped = False
        self.round.once(optimizers)
        with self.local.steps([*optimizers, *([] if scaler is None else [scaler])]):
            if counts:
                self._gradients.check_there(piece, optimizers)
                stepped = self._steps.take_some(optimizers, scaler)
            else:
                for one in optimizers:
                    one.zero_grad()
                forget_unscaled(scaler)
        self._gradients.used()
        return stepped

    def _merge(self, piece: Piece, many: float, optimizers: list[Any]) -> bool:
        """Follow a step over ``many`` samples or the like. True if the interval is over, and merged or on its way."""
        local, reducer, began = self.local, self._reducer, time.perf_counter()
        local.took(many)
        if piece.last or reducer.retrying:
            local.fill(piece.batch, optimizers)
        if reducer.travels:
            piece = self.round.committed(self._commit(piece))
            if piece.last and not reducer.late:  # a late rank has received the merged parameters
                local.apply(piece.step, local.flats.own)
            took = time.perf_counter() - began
        elif piece.last:
            self._meter.stop(piece)
            self.round.committed(True)  # from here on a loop that is left does not abandon the round
            whole = self._merges_all()
            local.send(whole)
            took = local.take_in(piece.step, 0 if whole else 1)
        if piece.last:
            self._meter.merged(took)
            local.over()
        return piece.last

    def _begin(self, piece: Piece, batch: Any) -> None:
        if not self.in_round:
            self.local.begin()
        super()._begin(piece, batch)

    def _step_begins(self, optimizer: torch.optim.Optimizer, closure: bool) -> None:
        if not self.local.stepping:
            raise PacelineError(
                "optimizer.step() was called by the program; with LocalSGD expected pace.step(optimizer) after "
                "each pace.backward(loss), which also merges; closures, as LBFGS needs them, are not supported"
            )

    def _step_ended(self, optimizer: torch.optim.Optimizer) -> None:
        """Do nothing: ``step`` has called the optimizer."""
