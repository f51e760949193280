"""The steps of ranks that step by themselves (LocalSGD), after each backward pass, and merge at intervals."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist

from paceline.errors import PacelineError
from paceline.torch import hooks_of_torch, timing
from paceline.torch.gradients.weighing import LocalWeighing
from paceline.torch.host import Host
from paceline.torch.local import Every
from paceline.torch.local_merge import Merges
from paceline.torch.members import Members
from paceline.torch.meter import Meter
from paceline.torch.mistakes.outside import Outside
from paceline.torch.plan import Piece, Source
from paceline.torch.progress import Progress
from paceline.torch.round import RoundState
from paceline.torch.steps import OptimizerWatch, RoundEnd, check_there, forget_unscaled, learning_rate


def _refuse_wrapped(model: torch.nn.Module, *_: Any) -> None:
    """Raises PacelineError before a forward pass through DDP, which would sum gradients in each of a rank's steps."""
    wrapped = hooks_of_torch.running_ddp() is not None
    if wrapped and torch.is_grad_enabled() and dist.get_world_size() > 1:
        raise PacelineError(
            "the model was called through DistributedDataParallel, and with LocalSGD each rank steps by itself; "
            "expected the plain module that LocalSGD was given: model(x) instead of ddp(x)"
        )


class LocalSteps:
    """The steps of a loop in which a round is an interval, and each of its micro-steps a step of this rank alone.

    merges: their ``begin`` is called by the weighing, with an interval's first micro-step. overlaps: an interval may
    begin before all changes are merged. end: of an interval. commit, named, abandon: as of the ``Loop``.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        round: RoundState,
        gradients: LocalWeighing,
        meter: Meter,
        members: Members,
        progress: Progress,
        end: RoundEnd,
        *,
        merges: Merges,
        every: Every,
        overlaps: bool,
        commit: Callable[[Piece], bool],
        named: Callable[[], AbstractContextManager[None]],
        abandon: Callable[[], None],
    ) -> None:
        self._round, self._gradients, self._meter, self._members = round, gradients, meter, members
        self._progress, self._end, self._merges = progress, end, merges
        self._every, self._overlaps = every, overlaps
        self._commit, self._named, self._abandon = commit, named, abandon
        self._source: Source | None = None  # of the running iteration
        self.merged = False  # the newest step has merged the parameters of all ranks
        self._hook = model.register_forward_pre_hook(_refuse_wrapped)
        outside = Outside(gradients.parameters, lambda: round.passing, "given to LocalSGD")
        self.watch = OptimizerWatch(model, True, self._step_begins, lambda optimizer: None, outside)

    def hosted_by(self, host: Host) -> None:
        """Refuse a framework."""
        self.stepped(0.0)

    def stepped(self, seconds: float) -> None:
        """Refuse a framework."""
        raise PacelineError(
            "LocalSGD is for your own loop, which calls pace.step(optimizer); a framework that steps the "
            "optimizer by itself needs Pace"
        )

    def step(self, optimizers: list[Any], scaler: Any) -> bool:
        """Take this rank's own step, and merge after an interval's last one. True when the optimizers stepped."""
        self.watch.check_each(optimizers)
        piece, many = self._round.steps_alone(), self._gradients.many
        with self._named():
            stepped = self._take(piece, optimizers, scaler, many > 0)
            over = self._merge(piece, many if stepped else 0.0, optimizers)
        self.merged = over and not self._merges.flights
        if over:
            self._meter.running.steps_at(learning_rate(optimizers))
            self._end.after(0.0)
        return many > 0

    # -- an iteration's course ---------------------------------------------------------------------------------------

    def open(self, source: Source) -> None:
        """An iteration over ``source`` begins."""
        self._source = source

    def left(self) -> None:
        """The running interval is left unfinished: restore the parameters of its beginning."""
        self._merges.back()

    def flush(self) -> None:
        """All rounds are settled: between two intervals merge the changes that are on their way."""
        if self._round.piece is None and self._merges.flights:
            with self._named():
                self._merges.take_in(self._progress.rounds - 1)
            self.merged = True

    def check_state(self) -> None:
        """Raises PacelineError if changes are on their way."""
        if self._merges.flights:
            raise PacelineError(
                f"a checkpoint after interval {self._progress.rounds - 1}, whose changes are still on their way "
                "(Merge(delay=1)); expected one if pace.merged, or after pace.flush() on all ranks"
            )

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps, besides the progress and the policy."""
        return {
            "every": self._every.state_dict(self._progress.rounds),
            "outer": self._merges.outer_state(),
        }

    def check(self, state: dict[str, Any]) -> None:
        """Raises PacelineError for the ``state`` of a checkpoint from which these steps cannot resume."""
        self._merges.check_outer(state.get("outer"))

    def load(self, state: dict[str, Any]) -> None:
        """Resume from a checkpoint with this ``state``."""
        self._merges.forget()  # else leaving a running interval would undo the parameters that were loaded
        if self._round.piece is not None:
            self._abandon()
        self._every.load_state_dict(state.get("every"))
        self._merges.load_outer(state.get("outer"))

    def close(self, failed: bool) -> None:
        """Leave a running interval, and remove all hooks. failed: the loop has failed."""
        self._merges.back()  # now: a failed loop may be left only later, when other code uses the model
        if self._merges.flights and not failed:
            warnings.warn(
                "the loop ended while changes were on their way (Merge(delay=1)), so each rank has parameters "
                "of its own; call pace.flush() on all ranks after a loop that is left within an epoch",
                RuntimeWarning,
                stacklevel=timing.level(),
            )
        self._hook.remove()
        self._merges.close()
        self.watch.close()

    # -- within ------------------------------------------------------------------------------------------------------

    def _merges_all(self) -> bool:
        """Whether the interval merges all changes: without a delay, or if it is known to be its iteration's last."""
        source, progress = self._source, self._progress
        if not self._overlaps or source is None:
            return True
        if source.number is None and source.more is not None:
            return not source.more()
        done = progress.samples_done + self._round.running.batch
        return source.samples is not None and done >= source.samples

    def _take(self, piece: Piece, optimizers: list[Any], scaler: Any, counts: bool) -> bool:
        """Step the optimizers, if the samples of this piece count; returns whether one of them has stepped."""
        stepped = False
        self._round.once(optimizers)
        with self._merges.steps([*optimizers, *([] if scaler is None else [scaler])]):
            if counts:
                check_there(self._gradients, piece, optimizers)
                stepped = self.watch.take_some(optimizers, scaler)
            else:
                for one in optimizers:
                    one.zero_grad()
                forget_unscaled(scaler)
        self._gradients.used()
        return stepped

    def _merge(self, piece: Piece, many: float, optimizers: list[Any]) -> bool:
        """Follow a step over ``many`` samples or the like. True if the interval is over, and merged or on its way."""
        merges, members, began = self._merges, self._members, time.perf_counter()
        merges.took(many)
        if piece.last or members.retrying:
            merges.fill(piece.batch, optimizers)
        if members.carries_rows:
            piece = self._round.committed(self._commit(piece))
            if piece.last and not members.late:  # a late rank has received the merged parameters
                merges.apply(piece.step, merges.flats.own)
            took = time.perf_counter() - began
        elif piece.last:
            self._meter.stop(piece)
            self._round.committed(True)  # from here on a loop that is left does not abandon the round
            whole = self._merges_all()
            merges.send(whole)
            took = merges.take_in(piece.step, 0 if whole else 1)
        if piece.last:
            self._meter.merged(took)
            merges.over()
        return piece.last

    def _step_begins(self, optimizer: torch.optim.Optimizer, closure: bool) -> None:
        if not self._merges.stepping:
            raise PacelineError(
                "optimizer.step() was called by the program; with LocalSGD expected pace.step(optimizer) after "
                "each pace.backward(loss), which also merges; closures, as LBFGS needs them, are not supported"
            )
