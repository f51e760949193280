"""The optimizer steps of one model: each is noticed, whichever code takes it, and one ends each round."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from operator import attrgetter, itemgetter
from time import perf_counter
from typing import Any
from zlib import crc32

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from paceline.errors import PacelineError, short
from paceline.torch import timing
from paceline.torch.gradients.weighing import GRAD, THERE, Weighing, held
from paceline.torch.host import Host
from paceline.torch.members import Members
from paceline.torch.meter import Meter
from paceline.torch.mistakes.checks import Checks
from paceline.torch.mistakes.closures import closure_of, with_same_losses
from paceline.torch.mistakes.learning_rates import LearningRateWatch
from paceline.torch.mistakes.outside import Outside
from paceline.torch.mistakes.zeroed import SharedParameters
from paceline.torch.plan import Piece, Source
from paceline.torch.progress import Progress
from paceline.torch.round import COMPLETE, RoundState

STEP = math.sqrt(2.0)  # between the weights of two options in a digest, modulo 1
PARAMETERS = "params", "param_names"  # of a group, which are no options
_REQUIRES_GRAD, _PARAMETERS = attrgetter("requires_grad"), itemgetter("params")
Before = Callable[[torch.optim.Optimizer, bool], None]
After = Callable[[torch.optim.Optimizer], None]


class OptimizerWatch:
    """Notices the optimizer steps of one model.

    before, after: called with each optimizer that holds one of the parameters; ``before`` also with whether the step
    has a closure, which runs the backward pass within the step. torch keeps its hooks for as long as the process
    lives, so they refer to this object weakly.

    model: has the parameters; those that require gradients now are summed over the ranks, and no others. exclusive:
    nothing else is summed, not even the parameters of another DistributedDataParallel module. outside: finds
    gradients of parameters outside of the model that are wrong with the ``option``, "" if none are. single: nothing
    is summed, since there is one rank, so that parameters may begin to require gradients later.

    Attributes:
        outside: See above.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        exclusive: bool,
        before: Before,
        after: After,
        outside: Outside,
        option: Callable[[], str] = str,
        single: bool = False,
    ) -> None:
        self.seconds = 0.0  # of the newest step
        self._began = 0.0
        self._checked: Any = None  # the optimizer that ``take`` steps now, without ``before`` and ``after``
        self._model, self._exclusive = model, exclusive
        self._ours = {id(p) for p in model.parameters() if p.requires_grad or single}
        self._frozen = [] if single else [p for p in model.parameters() if not p.requires_grad]
        # The number of parameters of each optimizer when it was checked that all of them are summed.
        self._sizes: dict[weakref.ref[Any], int] = {}
        self._seen: set[int] = set()  # parameters of optimizers, in ``check_each``
        self._others: set[weakref.ref[Any]] = set()  # those with parameters outside of the model
        self.outside, self._option = outside, option
        # A weak reference to the optimizer that was last found to concern the model, and its number of parameters.
        self._known: Any = int
        self._size = -1
        self._of_model: list[weakref.ref[Any]] = []  # the optimizers that have stepped the model
        self._before, self._after = before, after
        own = weakref.ref(self)

        def begins(optimizer: torch.optim.Optimizer, arguments: Any, named: Any) -> Any:
            steps = own()
            if steps is None or optimizer is steps._checked:
                return None
            steps._check_summed(optimizer)
            if not steps._concerned(optimizer):
                return None
            steps._before(optimizer, closure_of(arguments, named) is not None)
            return with_same_losses(optimizer, arguments, named)

        def ends(optimizer: torch.optim.Optimizer, *_: Any) -> None:
            steps = own()
            if steps is not None and optimizer is not steps._checked and steps._concerned(optimizer):
                steps._after(optimizer)

        self._ends, self._hooks = ends, list[Any]((register_optimizer_step_pre_hook(begins),))

    def check_ours(self, optimizers: Iterable[Any]) -> None:
        """Raises PacelineError for an optimizer that holds none of the parameters, or would move parameters that were
        not trained when Pace was made."""
        for one in optimizers:
            if one is self._known() and sum(map(len, map(_PARAMETERS, one.param_groups))) == self._size:
                continue
            if hasattr(one, "param_groups"):
                if not self._concerned(one):
                    raise PacelineError(
                        f"pace.step() was given a {type(one).__name__} without any parameter of this Pace's model; "
                        "step another model's optimizer yourself"
                    )
                if isinstance(one, torch.optim.Optimizer):  # one inside a wrapper is checked at its step
                    self._check_summed(one)

    def check_each(self, optimizers: Iterable[Any]) -> None:
        """As ``check_ours``, also where some parameters have been exchanged for as many others."""
        now = {id(p) for one in optimizers for p in held(one)}
        if not now <= self._seen:
            self._seen |= now
            self._sizes.clear()
            self._known = int
        self.check_ours(optimizers)

    def take(self, optimizers: list[Any], scaler: Any, heard: bool = True) -> float:
        """Step and zero the optimizers, with the GradScaler if there is one; returns the seconds it took.

        heard: whether ``before`` and ``after`` are called; False if the caller has checked the optimizers itself.
        """
        began = perf_counter() - timing.waited  # ``timing.now``, without a further call in each step
        try:
            for one in optimizers:
                if not heard:
                    self._checked = one
                if scaler is None:
                    one.step()
                else:
                    scaler.step(one)
        finally:
            self._checked = None
        if scaler is not None and optimizers:
            scaler.update()
        for one in optimizers:
            one.zero_grad()
        return perf_counter() - timing.waited - began

    def take_some(self, optimizers: list[Any], scaler: Any) -> bool:
        """``take``; False if the scaler skipped the step of every optimizer."""
        stepped: list[Any] = []
        hooks = [
            one.register_step_post_hook(lambda one, *_: stepped.append(one))
            for one in optimizers
            if scaler is not None and isinstance(one, torch.optim.Optimizer)
        ]
        try:
            self.take(optimizers, scaler, heard=False)
        finally:
            for hook in hooks:
                hook.remove()
        return bool(stepped) or len(hooks) < len(optimizers)

    def begin(self) -> None:
        """A step begins: measure it, and notice its end, too."""
        if len(self._hooks) == 1:
            self._hooks.append(register_optimizer_step_post_hook(self._ends))
        self._began = timing.now()

    def end(self) -> float:
        """Returns the seconds of the step, which has ended."""
        self.seconds = timing.now() - self._began
        return self.seconds

    def rate(self) -> float:
        """The learning rate of the model's optimizer that was stepped last; NaN before a step."""
        return learning_rate([self._known()])

    def options(self) -> float:
        """A number made from all options of the model's optimizers: see ``digest``; NaN before a step."""
        return digest(found for ref in self._of_model if (found := ref()) is not None)

    def others(self) -> float:
        """A number made from parameters of the loss outside of the model, to be compared between ranks; 0 if none."""
        return self.outside.number() if self._others else 0.0

    def described(self) -> str:
        """The options of the first group of the optimizer that was stepped last, for an error message."""
        groups = getattr(self._known(), "param_groups", None)
        named = groups[0].items() if groups else ()
        shown = (f"{name}={short(value)}" for name, value in named if name not in PARAMETERS)
        return ", ".join(islice(shown, 4))

    def close(self) -> None:
        """Notice no more steps."""
        for hook in self._hooks:
            hook.remove()
        self.outside.close()

    def _check_summed(self, optimizer: torch.optim.Optimizer) -> None:
        """Raises PacelineError if the optimizer would move parameters that were not trained when Pace was made, or
        whose gradients the running options have left wrong."""
        size, this = sum(map(len, map(_PARAMETERS, optimizer.param_groups))), weakref.ref(optimizer)
        if self._sizes.get(this) != size or any(map(_REQUIRES_GRAD, self._frozen)):
            names = {id(p): name for name, p in self._model.named_parameters()}
            other = "a parameter outside of the model" if self._exclusive and self._holds(optimizer) else ""
            for parameter in held(optimizer):
                name = names.get(id(parameter), other)
                if name and parameter.requires_grad and id(parameter) not in self._ours:
                    instead = (
                        "part of the model that was given, and trained"
                        if self._exclusive
                        else "requires_grad from the start, with learning rate 0 for now, or a new "
                        "DistributedDataParallel and Pace"
                    )
                    raise PacelineError(
                        f"optimizer.step() would move {name}, which was not trained when Pace was made; expected "
                        + instead
                    )
            self._sizes[this] = size
            if not all(id(p) in names for p in held(optimizer)):
                self._others.add(this)
        if this in self._others:
            self._check_outside(optimizer)
        elif optimizer is self._known() and not self._frozen:
            self._size = size

    def _check_outside(self, optimizer: torch.optim.Optimizer) -> None:
        """Raises PacelineError if the optimizer would move parameters outside of the model by gradients that the
        running options have left wrong. Others are noted, for a comparison between ranks."""
        outside = self.outside
        if outside.second and not self._holds(optimizer):
            outside.steps_second(held(optimizer))
        if not ((option := self._option()) or outside.looks):
            return
        own = {id(p) for p in self._model.parameters()}
        theirs = [p for p in held(optimizer) if id(p) not in own]
        moved = [p for p in theirs if p.grad is not None]
        # An optimizer of its own may move another model, by the gradients of another loss.
        holds = self._holds(optimizer)
        wrong = next(iter(moved), None) if holds and option else outside.look(moved)
        if wrong is not None and not option:
            outside.moved(theirs)
        elif wrong is not None:
            raise PacelineError(
                f"optimizer.step() would move a parameter of shape {tuple(wrong.shape)} outside of the model, and "
                f"{option} weights the model's gradients alone; expected one module with all parameters of the "
                "loss, wrapped once and given to Pace"
            )

    def _holds(self, optimizer: torch.optim.Optimizer) -> bool:
        return any(id(p) in self._ours for p in held(optimizer))

    def _concerned(self, optimizer: torch.optim.Optimizer) -> bool:
        """True when the optimizer holds one of the parameters."""
        if optimizer is self._known():
            return True
        if found := self._holds(optimizer):  # usually by its first parameter
            self._known, self._size = weakref.ref(optimizer), -1
            if self._known not in self._of_model:
                self._of_model.append(self._known)
        return found


class RoundEnd:
    """The end of a round on this rank, after its optimizer step: the next one may begin.

    Attributes:
        stepped: A round's step was taken, by the loop or its host.
        left_out: Rounds whose step was left out on purpose.
    """

    def __init__(self, round: RoundState, gradients: Weighing, meter: Meter, progress: Progress) -> None:
        self._round, self._gradients, self._meter, self._progress = round, gradients, meter, progress
        self.stepped, self.left_out = False, 0

    def after(self, seconds: float | None, by: Sequence[Any] = ()) -> None:
        """The round's optimizer step has ended after ``seconds``, or was left out on purpose (None). by: optimizers
        that have stepped, if they are not known yet."""
        piece = self._round.stepped(by)
        if seconds is None:
            self.left_out, seconds = self.left_out + 1, 0.0
        else:
            self.stepped = True
        self._meter.step_ended(seconds)
        self._gradients.used()
        self._progress.advance(piece.plan.batch)


class RoundSteps:
    """The steps of a loop in which each round ends in one, on all ranks.

    end: of a round. single: one rank alone, so that nothing is summed. rates: learning rates are recorded.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        round: RoundState,
        gradients: Weighing,
        checks: Checks,
        meter: Meter,
        members: Members,
        progress: Progress,
        end: RoundEnd,
        *,
        single: bool,
        rates: bool,
    ) -> None:
        self._round, self._gradients, self._meter, self._members = round, gradients, meter, members
        self._checks, self._shared = checks, SharedParameters(gradients)
        self._progress, self._end, self._records_rates = progress, end, rates
        self._rates, self._host, self._hosted = LearningRateWatch(), Host(), False
        outside = Outside(gradients.parameters, lambda: round.passing, second=members.carries_rows)
        watch = members.carries_rows, self._step_begins, self._step_ended
        self.watch = OptimizerWatch(model, *watch, outside, lambda: gradients.model_only, single)

    def hosted_by(self, host: Host) -> None:
        """A framework runs the loop."""
        self._host, self._hosted = host, True

    def stepped(self, seconds: float) -> None:
        """The framework has stepped the optimizer of the complete round."""
        self._end.after(seconds)

    def step(self, optimizers: list[Any], scaler: Any) -> bool:
        """Step and zero the optimizers when the round is complete; otherwise do nothing. True when they stepped."""
        round, members = self._round, self._members
        self.watch.check_ours(optimizers)
        if members.carries_rows:
            members.check_handed_over([*optimizers, *([] if scaler is None else [scaler])])
        if round.taken or len(optimizers) > 1:
            round.once(optimizers)
        if (piece := round.piece) is None:
            return self._step_later(optimizers, scaler)
        if round.phase != COMPLETE or not piece.first:
            self._rates.watch(optimizers, piece.step, round.phase == COMPLETE)
            if round.phase != COMPLETE:
                return False
        if members.late:
            forget_unscaled(scaler)
            self._end.after(0.0, optimizers)  # this rank has received the state after the step
            return True
        if self._checks.looks:
            self._checks.steps(piece)
        check_there(self._gradients, piece, optimizers)
        # The checks before a step have been made above, and only a framework needs notice of it.
        seconds = self.watch.take(optimizers, scaler, self._hosted)
        if round.piece is None:  # the host has reported the step
            return self._took_later(optimizers, seconds)
        if self._records_rates:
            self._meter.running.steps_at(learning_rate(optimizers))
        self._end.after(seconds, optimizers)
        return True

    def _step_later(self, optimizers: list[Any], scaler: Any) -> bool:
        """``step`` after the round's step: other optimizers step, too."""
        if not (taken := self._round.taken):
            self._gradients.used()
            return False
        if scaler is not None:
            raise PacelineError(
                "with a GradScaler, several optimizers are stepped together: pace.step([first, second], scaler)"
            )
        self._gradients.check_summed(self._progress.rounds - 1, optimizers)
        self._shared.check(self._progress.rounds - 1, taken, optimizers, self._round.further)
        seconds = self.watch.take(optimizers, scaler, self._hosted)
        return self._took_later(optimizers, seconds)

    def _took_later(self, optimizers: list[Any], seconds: float) -> bool:
        self._round.took(optimizers)
        if (running := self._meter.running) is not None:
            running.stepped_again(seconds)
        self._gradients.used()
        return bool(optimizers)

    # -- an iteration's course, which concerns local steps alone --------------------------------------------------

    def open(self, source: Source) -> None:
        """An iteration over ``source`` begins."""

    def left(self) -> None:
        """The running round is left unfinished; its gradients are dropped next."""

    def flush(self) -> None:
        """All rounds are settled."""

    def check_state(self) -> None:
        """Raises PacelineError if no checkpoint can be made now."""

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps, besides the progress and the policy."""
        return {}

    def check(self, state: dict[str, Any]) -> None:
        """Raises PacelineError for the ``state`` of a checkpoint from which these steps cannot resume."""

    def load(self, state: dict[str, Any]) -> None:
        """Resume from a checkpoint with this ``state``."""

    def close(self, failed: bool) -> None:
        """Notice no more steps. failed: the loop has failed."""
        self.watch.close()

    # -- called before and after each step of an optimizer with the model's parameters, whoever takes it -----------

    def _step_begins(self, optimizer: torch.optim.Optimizer, closure: bool) -> None:
        if self._members.carries_rows:
            if closure:
                raise PacelineError(
                    f"{type(optimizer).__name__}.step(closure) with ElasticPace, whose rounds may be run again by "
                    "other ranks; expected an optimizer that steps after the backward pass, or Pace"
                )
            self._members.check_handed_over([optimizer])
        round = self._round
        self._host.step_begins(round.piece)
        self.watch.begin()
        round.steps(closure, self._gradients.there)
        if round.phase == COMPLETE:
            self._checks.steps(round.running)
        if self._progress.running or round.piece is not None:
            round.once([optimizer])
            if round.piece is None:
                self._gradients.check_summed(self._progress.rounds - 1, [optimizer])
                if round.taken and not self._hosted:  # pace.step() has zeroed
                    self._shared.check(self._progress.rounds - 1, round.taken, [optimizer], round.further)

    def _step_ended(self, optimizer: torch.optim.Optimizer) -> None:
        round = self._round
        round.steps(False, self._gradients.there)  # a closure has only now run its backward pass
        if round.phase == COMPLETE:
            self._checks.steps(round.running)
        seconds = self.watch.end()
        if self._progress.running or round.piece is not None:
            round.took([optimizer])
        self._host.step_ended(seconds)


def check_there(gradients: Weighing, piece: Piece, optimizers: Iterable[Any]) -> None:
    """Raises PacelineError if all gradients of an optimizer's parameters were removed since the backward pass."""
    for one in optimizers:
        for group in getattr(one, "param_groups", ()):
            if any(map(THERE, map(GRAD, group["params"]))):  # usually found at the first
                break
        else:
            gradients.check_removed(piece, one)


def digest(optimizers: Iterable[Any]) -> float:
    """A number made from all options of all groups of these optimizers, such as learning rate, momentum and decay; it
    changes by at least the relative change of an option. NaN without an optimizer."""
    groups = (group for optimizer in optimizers for group in optimizer.param_groups)
    options = [value for group in groups for name, value in group.items() if name not in PARAMETERS]
    return _number(options) if options else math.nan


def _number(value: Any) -> float:
    """A number made from an option: the logarithm of a number, so that small ones count like large ones."""
    if isinstance(value, float) or value.__class__ is int:
        if not value or not math.isfinite(value):
            return 100.0
        return math.log(abs(value)) + (200.0 if value < 0 else 0.0)
    if isinstance(value, tuple | list):
        return math.fsum((1.0 + (number + 1) * STEP % 1.0) * _number(one) for number, one in enumerate(value))
    if isinstance(value, torch.Tensor):  # one on a device would be waited for
        return _number(value.item()) if value.is_cpu and value.numel() == 1 else 0.0
    return crc32(repr(value).encode()) / 2**32 if isinstance(value, str | bool | None) else 0.0


def forget_unscaled(scaler: Any) -> None:
    """Reset the state of a GradScaler that may have unscaled gradients for a step that is not taken, so that it
    unscales them the next time. scaler: None if there is none."""
    if scaler is not None:
        scaler.update(scaler.get_scale())  # with a number, it needs no step before


def learning_rate(optimizers: list[Any]) -> float:
    """The learning rate of the first optimizer's first parameter group; NaN if there is none."""
    groups = getattr(optimizers[0], "param_groups", None) if optimizers else None
    return float(groups[0].get("lr", float("nan"))) if groups else float("nan")
