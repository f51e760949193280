"""The loop of ranks that step by themselves (``loop="local"``), after each backward pass, and merge at intervals."""

from __future__ import annotations

import math
import time
import warnings
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from paceline.errors import PacelineError
from paceline.torch.gradients.reducers import Reducer
from paceline.torch.gradients.steps import forget_unscaled, learning_rate
from paceline.torch.gradients.weighing import Weighing
from paceline.torch.local_merge import Merges
from paceline.torch.loop import Loop
from paceline.torch.passes import MicroStep, Passes
from paceline.torch.plan import Piece, Source


class LocalWeighing(Weighing):
    """Each gradient belongs to one step of this rank: the mean over its batch, without a sum over the ranks."""

    def __init__(self, parameters: list[torch.nn.Parameter], device: torch.device, reducer: Reducer) -> None:
        super().__init__(parameters, device, reducer, by_hook=False, exact=False)
        self.exact = True  # no backward pass sums anything over the ranks
        self.many = 0.0  # number that the loss is a mean over

    def weigh(self, piece: Piece, count: float | None) -> None:
        self.bring_back(piece.step)
        if piece.first:
            self._counts.begin()
        if piece.samples:  # tokens of one step and samples of another do not add up to a weight
            self._counts.add(piece.step, count, last=False)
        self.many = float(piece.samples if count is None else count)

    def weight(self, piece: Piece, part: float) -> float:
        return part / self.many if self.many else 0.0


class LocalPasses(Passes):
    """Passes after each of which a step is due."""

    gradients: LocalWeighing

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.gradients = LocalWeighing(*given[:3])  # parameters, device, reducer
        self.watch.never()  # each step's loss is its own mean, so it needs no check
        self.stepped = False  # this rank has stepped in the running micro-step

    def begin(self, piece: Piece, batch: Any) -> None:
        super().begin(piece, batch)
        self.stepped = False

    def ended(self) -> None:
        """The backward pass of this micro-step has ended."""
        assert self.micro_step is not None
        self.micro_step.done = True
        self.gradients.ready()

    def check_taken(self) -> None:
        """Raises PacelineError if the micro-step is over, and its backward pass or its step was left out."""
        if self.micro_step is not None and not self.micro_step.done:
            super().check_taken()
        elif self.micro_step is not None and not self.stepped:
            raise PacelineError(
                f"interval {self.piece.step}: the loop went on without pace.step(optimizer); with loop='local' it is "
                "expected after each pace.backward(loss), since the last one of an interval merges"
            )

    def _check_global(self, micro_step: MicroStep, count: float | None) -> NoReturn:
        raise PacelineError(
            "reduction='global' is for a loss over the samples of all ranks, and with loop='local' each rank steps "
            "by itself; pass a mean, a sum or count="
        )

    def _weight_behind(self, reduction: str, count: float | None) -> NoReturn:
        raise PacelineError(
            "pace.weighted() weights the loss of a second model by a round's samples, and with loop='local' each "
            "rank steps by itself; make a Pace for each model"
        )


def _refuse_wrapped(model: torch.nn.Module, *_: Any) -> None:
    """Raises PacelineError before a forward pass through DDP, which would sum gradients in each of a rank's steps."""
    wrapped = DistributedDataParallel._active_ddp_module is not None
    if wrapped and torch.is_grad_enabled() and dist.get_world_size() > 1:
        raise PacelineError(
            "the model was called through DistributedDataParallel, and with loop='local' each rank steps by itself; "
            "expected the plain module that Pace was given: model(x) instead of ddp(x)"
        )


class LocalLoop(Loop):
    """A loop in which a round is an interval, and each of its micro-steps is a step of this rank alone."""

    PASSES: type[Passes] = LocalPasses
    passes: LocalPasses

    local: Merges
    _source: Source | None = None  # source of the running iteration

    def __init__(self, model: torch.nn.Module, *given: Any) -> None:
        super().__init__(model, *given)
        assert self.terms.merge is not None
        if not self.terms.every.fixed:
            self.rounds.every = self.terms.every
        self.behind = self.terms.merge.delay > 0
        self.rounds.one_by_one, self._meter.settle = self.behind, self.settle
        self._meter.rate = self._meter.options = lambda: math.nan  # each rank has its own schedule
        self._hook = model.register_forward_pre_hook(_refuse_wrapped)
        self.local = Merges(model, self.terms.merge, self._reducer)

    @property
    def due(self) -> bool:
        passes = self.passes
        return passes.micro_step is not None and passes.micro_step.done and not passes.stepped

    def abandon(self) -> None:
        """Abandon as the base class does, and restore the parameters of the interval's beginning."""
        if self.in_round:
            self.local.back()
        super().abandon()

    def drawn_ahead(self, micro_steps: int = 0) -> None:
        super().drawn_ahead(micro_steps + self.behind)

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
        passes, local = self.passes, self.local
        self._steps.check_ours(optimizers)
        self._check_due()
        micro_step, many = passes.micro_step, passes.gradients.many
        assert micro_step is not None
        passes.stepped = True
        with self.named():
            stepped = self._take(micro_step.piece, optimizers, scaler, many > 0)
            over = self._merge(micro_step, many if stepped else 0.0, optimizers)
        self.merged = over and not local.flights
        if over:
            if self._meter.running is not None:
                self._meter.running.learning_rate = learning_rate(optimizers)
            super().stepped(0.0)
        return many > 0

    def stepped(self, seconds: float | None) -> None:
        raise PacelineError(
            "loop='local' is for your own loop, which calls pace.step(optimizer); a framework that steps the "
            "optimizer by itself needs another loop="
        )

    def _merges_all(self) -> bool:
        """Whether the interval merges all changes: without a delay, or if it is known to be its iteration's last."""
        source, progress = self._source, self.progress
        if not self.behind or source is None:
            return True
        if source.number is None:
            return not source.more()
        done = progress.samples_done + self.passes.piece.batch
        return source.samples is not None and done >= source.samples

    def _open(self, source: Source) -> object:
        self._source = source
        return super()._open(source)

    def _check_due(self) -> None:
        passes = self.passes
        if passes.micro_step is None or passes.stepped:
            raise PacelineError(
                "pace.step() was called twice for one batch, or outside of the loop; with loop='local' expected one "
                "call after each pace.backward(loss), with all optimizers in a list: pace.step([first, second])"
            )
        if not passes.micro_step.done:
            raise PacelineError(
                f"interval {passes.piece.step}: pace.step() was called before pace.backward(loss); expected it after"
            )

    def _take(self, piece: Piece, optimizers: list[Any], scaler: Any, counts: bool) -> bool:
        """Step the optimizers, if the samples of this piece count; returns whether one of them has stepped."""
        stepped = False
        self.local.keep([*optimizers, *([] if scaler is None else [scaler])])
        self.local.stepping = True
        try:
            if counts:
                self._gradients.check_there(piece, optimizers)
                self._steps.taken = []
                stepped = self._steps.take_some(optimizers, scaler)
            else:
                for one in optimizers:
                    one.zero_grad()
                forget_unscaled(scaler)
        finally:
            self.local.stepping = False
        self._gradients.used()
        return stepped

    def _merge(self, micro_step: MicroStep, many: float, optimizers: list[Any]) -> bool:
        """Follow a step over ``many`` samples or the like. True if the interval is over, and merged or on its way."""
        local, reducer, piece, began = self.local, self._reducer, micro_step.piece, time.perf_counter()
        local.took(many)
        if piece.last or reducer.retrying:
            local.fill(piece.batch, optimizers)
        if reducer.travels:
            micro_step.piece = piece = self.work.commit(piece)
            if piece.last and not reducer.late:  # a late rank has received the merged parameters
                local.apply(piece.step, local.flats.own)
            local.seconds = time.perf_counter() - began
        elif piece.last:
            self._meter.stop(piece)
            micro_step.complete = True  # from here on a loop that is left does not abandon the round
            whole = self._merges_all()
            local.send(whole)
            local.take_in(piece.step, 0 if whole else 1)
        if piece.last:
            self._meter.link = local.seconds
            local.over()
        return piece.last

    def _begin(self, piece: Piece, batch: Any) -> None:
        if not self.in_round:
            self.local.begin()
        super()._begin(piece, batch)

    def _step_begins(self, optimizer: torch.optim.Optimizer, closure: bool) -> None:
        if not self.local.stepping:
            raise PacelineError(
                "optimizer.step() was called by the program; with loop='local' expected pace.step(optimizer) after "
                "each pace.backward(loss), which also merges; closures, as LBFGS needs them, are not supported"
            )

    def _step_ended(self, optimizer: torch.optim.Optimizer) -> None:
        """Do nothing: ``step`` has called the optimizer."""
