"""A model's gradients: weighed, accumulated piece by piece, and reduced once a round.

DDP averages over n ranks, so the mean loss of a micro-batch of m samples is weighed by n m / B (LB-BSP, weighted
aggregation: g = (1/X) sum_i |B_i| g_i). Under the hook, DDP's sum is weighed instead of the loss.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import partial
from itertools import repeat
from operator import attrgetter, is_not
from typing import Any

import torch

from paceline.errors import PacelineError
from paceline.torch import peers
from paceline.torch.gradients.counts import Counts
from paceline.torch.gradients.filler import Filler
from paceline.torch.gradients.reducers import LOOKS, Reducer
from paceline.torch.gradients.same_bits import ExactSum
from paceline.torch.hooks_of_torch import version
from paceline.torch.plan import Piece

MEAN, SUM, GLOBAL = KINDS = "mean", "sum", "global"  # what a loss is over its samples
# Options that weigh or correct the model's gradients after they have been computed, and no others.
COUNT, DROP, DETERMINISTIC, HOOK = "count=", "drop=", "deterministic=True", "weigh='hook'"
GRAD, THERE = attrgetter("grad"), partial(is_not, None)  # in C: they run once a round for each parameter


class GradientStash:
    """Keeps the gradients of one model over the pieces of a round, and checks them from round to round.

    For each piece: ``bring_back`` before its backward pass, then ``put``, or ``ready`` after a round's last one. For
    each round: ``check_removed`` before its step, ``used`` after it; ``drop`` if it is left unfinished.

    Attributes:
        filler: Has the passes of filler samples add zeros.
    """

    def __init__(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        self.parameters = list(parameters)
        self.filler = Filler(self.parameters)
        self._kept: list[torch.Tensor | None] | None = None  # accumulated over the round's finished pieces
        self._begun = False  # a backward pass of the running round has begun, and may have been left
        self._had: list[bool] = []  # which parameters had gradients when the newest round was complete
        self._used: list[tuple[int, int] | None] | None = None  # identity and version after the last step
        self._passed = False  # another model's backward pass may have left gradients here since
        # Identity and version of each gradient before a further pass whose gradients are this rank's alone, if any.
        self._unsummed: list[tuple[int, int] | None] | None = None
        self._looks = LOOKS  # at gradients that are there before a round's first pass, and may all be zero
        # A rank has no work in the round that is over, so that its gradients of a further pass are zero.
        self._idle = False

    def bring_back(self, piece: Piece, apart: bool = False, fresh: bool = False, scale: float = 1.0) -> None:
        """The backward pass of a piece begins: put the accumulated gradients back, times ``scale``; if the pass runs
        ``apart``, ``join`` does so after it. fresh: if it is the round's first, no gradient may be there.

        Raises PacelineError if the model has a gradient that is not of this round.
        """
        self._begun = True
        if any(map(THERE, map(GRAD, self.parameters))):
            self._check_found(piece.step, fresh and piece.first)
        self._passed, self._used, self._unsummed = False, None, None
        if (kept := self._kept) is None or apart:
            return
        self._kept = None
        if scale != 1.0:
            torch._foreach_mul_([g for g in kept if g is not None], scale)
        put(self.parameters, kept)

    def join(self) -> None:
        """A backward pass that ran apart is done: add the accumulated gradients to its own."""
        if (kept := self._kept) is not None:
            self._kept = None
            for parameter, before in zip(self.parameters, kept, strict=True):
                if before is not None:
                    parameter.grad = before if parameter.grad is None else before.add_(parameter.grad)

    def take_back(self) -> None:
        """A backward pass that ran apart has failed: drop the gradients that it has left in the model."""
        put(self.parameters)

    def put(self) -> None:
        """The backward pass of a piece is done, and another piece follows: take the gradients out of the model."""
        self._kept = [p.grad for p in self.parameters]
        put(self.parameters)

    def ready(self) -> None:
        """The round's gradients are complete."""
        self._had = list(map(THERE, map(GRAD, self.parameters)))

    def check_removed(self, piece: Piece, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer without any gradient is about to step. Raises PacelineError if its parameters had some when
        the gradients were ``ready``."""
        had = {id(p) for p, there in zip(self.parameters, self._had, strict=False) if there}
        if any(id(p) in had for p in held(optimizer)):
            raise PacelineError(
                f"round {piece.step}: the gradients were zeroed between pace.backward(loss) and the optimizer's "
                "step; call zero_grad() before the backward pass, or leave it out, since pace.step(optimizer) "
                "zeroes"
            )

    def check_summed(self, step: int, optimizers: Iterable[Any]) -> None:
        """Optimizers are about to step after the step of round ``step``. Raises PacelineError if they would use
        gradients of this rank alone."""
        if self._unsummed is None:
            return
        before = {id(p): each for p, each in zip(self.parameters, self._unsummed, strict=True)}
        moved = (p for one in optimizers for p in held(one) if id(p) in before)
        if any(self._left(p) and _which(p.grad) != before[id(p)] for p in moved):
            raise PacelineError(
                f"round {step}: an optimizer would step with gradients of a pace.weighted(loss) that DDP did not sum "
                "over the ranks; expected a forward pass of its own by ddp(x), not model(x), with weigh='loss'; or "
                "zero_grad(set_to_none=True) before, if these gradients are of no use"
            )

    def _left(self, parameter: torch.nn.Parameter) -> bool:
        """Whether a further pass may have left a gradient in a parameter. Zeros do not count, but for those of a rank
        without work: all ranks must find the same."""
        return parameter.grad is not None and (self._idle or bool(parameter.grad.any()))

    def accept(self) -> None:
        """The gradients that are in the model now are the program's own, which zeroes each when it likes."""
        self._used, self._looks = None, 0

    def removed(self, parameters: Iterable[torch.nn.Parameter]) -> bool:
        """Whether one of these had a gradient when the newest round was complete, and has none or zeros now."""
        had = {id(p) for p, there in zip(self.parameters, self._had, strict=False) if there}
        return any(id(p) in had and (p.grad is None or not bool(p.grad.any())) for p in parameters)

    def used(self) -> None:
        """The round's step was taken, or left out on purpose."""
        self._begun, self._used, self._unsummed = False, None, None
        if any(map(THERE, map(GRAD, self.parameters))):  # else no gradient can be counted again
            self._used = [_which(p.grad) for p in self.parameters]

    def drop(self) -> None:
        """The running round is left unfinished: drop its gradients."""
        self.filler.end()
        if self._begun or self._kept is not None:
            put(self.parameters)
        self._kept, self._used, self._had, self._begun = None, None, [], False

    def there(self) -> bool:
        """Whether the model has got a gradient since the last step; zeros do not count as one."""
        used = self._used or [None] * len(self.parameters)
        now = zip(self.parameters, used, strict=True)
        return any(
            p.grad is not None and _which(p.grad) != before and bool(p.grad.any()) for p, before in now
        )

    def finite(self) -> bool:
        """Whether no gradient holds an infinity or NaN."""
        grads = [p.grad for p in self.parameters if p.grad is not None]
        return all(bool(torch.isfinite(g).all()) for g in grads)

    def scale(self, factor: float | torch.Tensor) -> None:
        """Multiply the gradients by a number, or by a tensor with one, shape ()."""
        torch._foreach_mul_([p.grad for p in self.parameters if p.grad is not None], factor)

    def _check_found(self, step: int, fresh: bool) -> None:
        """Raises PacelineError for gradients that are in the model before a backward pass, see ``bring_back``."""
        passed, self._passed = self._passed, False
        if passed and any(p.grad is not None and bool(p.grad.any()) for p in self.parameters):
            raise PacelineError(
                f"round {step}: the backward pass of another model has left gradients in this one, which would "
                "count here; expected this model to be zeroed before pace.backward(loss)"
            )
        if self._kept is not None:
            raise PacelineError(
                f"round {step}: gradients were added to the model between two pieces of the round; expected only "
                "those of pace.backward(loss): call it instead of loss.backward(), once for each piece"
            )
        now = zip(self.parameters, self._used or (), strict=False)
        left = [p.grad for p, before in now if before == _which(p.grad)]
        if any(grad is not None and bool(grad.any()) for grad in left):  # zeroed in place is allowed
            raise PacelineError(
                f"round {step}: gradients of the round before are still in the model; expected each optimizer to be "
                "stepped and zeroed once a round: pace.step(optimizer), or pace.step([one, other]); for parameters "
                "without an optimizer model.zero_grad(), or requires_grad_(False) from the start"
            )
        if fresh and self._looks and not passed:
            # A loop that zeroes in place leaves zeros in each round, and reading them costs time.
            self._looks -= 1
            if self.there():
                raise PacelineError(
                    f"round {step}: a loss.backward() without a weight has left gradients in the model; expected "
                    "pace.backward(loss) with the sum of the losses, and zero_grad() after other passes"
                )


class Weighing(GradientStash):
    """Weighs the loss of each micro-step. For each ``begin``, then ``weigh`` before its backward pass and ``done``
    after it; ``used`` when a round is over, ``drop`` if it is left unfinished.

    varies: the number of samples run in a round is only known at its end. counted: gives the count over all ranks
        that a round's losses are means over, once its last gradient is ready; None if it is not known by then.
    per_sample: about the count of a sample, a power of two, the same on all ranks from one round to the next.
    apart: gradients of a pass are added to the accumulated ones when it has ended, so that a failed one is undone.

    Attributes:
        sums: A round's last backward pass sums its gradients over the ranks.
        no_global, no_second: Why a loss over the samples of all ranks, or that of a second model, cannot be weighted;
            "" if it can.
        model_only: The option that weighs or corrects the model's gradients only, so that a loss leaves wrong ones in
            parameters outside of the model; "" if those are exact, too.
    """

    def __init__(
        self,
        parameters: Sequence[torch.nn.Parameter],
        device: torch.device,
        reducer: Reducer,
        *,
        varies: bool = False,
        counted: Callable[[int], float | None] = lambda step: None,
        per_sample: Callable[[], float] = lambda: 1.0,
        apart: bool = False,
    ) -> None:
        super().__init__(parameters)
        self._reducer, self._varies, self.apart = reducer, varies, apart
        self._ranks = peers.ranks() if reducer.averages else 1
        self._averaged = self._ranks  # DDP divides by this
        self.sums = reducer.sums
        self.no_global = (
            "drop= leaves out samples that the loss was normalised with; leave it out" * varies
            or "with ElasticPace there is no process group of all ranks, over which it could be one; pass a mean, a "
            "sum or count="
            * reducer.carries_counts
        )
        self.no_second = "ElasticPace sums the gradients of one model only" * reducer.carries_counts
        self.model_only = DROP * varies
        # PowerSGD adds the errors of one round to the gradients of the next, so that both must have one unit.
        self._counts = Counts(device, counted, lambda: 1.0 if reducer.remembers else per_sample())
        self.entered: AbstractContextManager[Any] | None = None  # the ``no_sync`` that is in effect

    def begin(self, piece: Piece) -> None:
        """A micro-step begins: only the round's last one reduces gradients over the ranks. May be left out for a
        round's only one, if the weighing ``sums``."""
        self.release()
        if not (piece.last and self.sums):
            self.entered = self._reducer.no_sync()
            self.entered.__enter__()

    def weigh(self, piece: Piece, part: float, count: float | None, first: bool, reduction: str) -> float:
        """A backward pass of a micro-step begins: the weight of its loss, which counts as a mean over ``part``
        samples. count: what it is over, if not its samples. first: it is the micro-step's first pass."""
        sums = piece.last and self.sums
        if first:
            self.bring_back(piece, self.apart and not sums, True)
            if not sums or count is not None or self._counts.given:  # else certainly nothing is counted
                self._count_in(piece, count)
        if self._reducer.reduces() is not sums:
            self._reducer.check_sync(sums)
        return self._averaged * part / (piece.plan.batch * self._counts.per_sample)

    def _count_in(self, piece: Piece, count: float | None) -> None:
        if (count is not None or not piece.last or self._counts.given) and not self._reducer.carries_counts:
            self._counts.add(piece.step, count, piece.last)

    def count_back(self, step: int, count: float) -> None:
        """A backward pass that ran apart, whose loss was over ``count``, has failed: subtract the count."""
        if not self._reducer.carries_counts:
            self._counts.add(step, -count, False)

    def weight_after_step(self, piece: Piece, part: float) -> float:
        """The weight of another model's loss, over ``part`` samples of a round that is over."""
        self._passed = True  # its backward pass may run through this model
        self._idle = not piece.plan.loads.all()
        there = any(map(self._left, self.parameters))
        unsummed = self._sums_next() is False
        if not there or (unsummed and self._unsummed is None):
            self._unsummed = [_which(p.grad) for p in self.parameters] if unsummed else None
        return self._averaged * part / piece.batch

    def _sums_next(self) -> bool | None:
        return self._reducer.sums_next()

    def global_part(self, piece: Piece) -> float:
        """The ``part`` of a loss that is already one over the samples of all ranks: with it, the round's gradient is
        DDP's plain mean over the ranks of the sum over each one's micro-steps."""
        return piece.batch / self._ranks

    def done(self, piece: Piece) -> None:
        """The micro-step's backward pass is done. Collective after a round's last."""
        if not piece.last:
            self.put()
            return
        if (given := self._counts.given) or self._varies:
            if given and not self.model_only:
                self.model_only = COUNT  # the factor does not reach them
            self.scale(self._counts.factor(piece.step, piece.batch))
        elif given is not None:
            self._counts.begin()
        self.ready()

    def drop(self) -> None:
        super().drop()
        self._counts.begin()

    def release(self) -> None:
        """Leave ``no_sync``: the model reduces its gradients again."""
        entered, self.entered = self.entered, None
        if entered is not None:
            entered.__exit__(None, None, None)


class ExactWeighing(Weighing):
    """Weighs the loss of each micro-step, and sums the gradients without rounding, after the round's last one."""

    def __init__(
        self, parameters: Sequence[torch.nn.Parameter], device: torch.device, reducer: Reducer, **options: Any
    ) -> None:
        super().__init__(parameters, device, reducer, **options)
        self._sum, self._averaged, self.sums = ExactSum(parameters), 1, False
        self.model_only = DETERMINISTIC

    def done(self, piece: Piece) -> None:
        self._sum.add()
        if piece.last:
            self._sum.finish()
            super().done(piece)


class HookWeighing(Weighing):
    """Weighs what DDP's communication hook sums, not a loss: ``gather`` when a backward pass begins, ``gathered``
    after it."""

    # The count that the coming piece's gradient is a mean over, if that is not its samples, and the count that the
    # gradients accumulated so far are a mean over.
    _count: float | None = None
    _weighed = 0.0

    def __init__(
        self, parameters: Sequence[torch.nn.Parameter], device: torch.device, reducer: Reducer, **options: Any
    ) -> None:
        super().__init__(parameters, device, reducer, **options)
        self.model_only = HOOK

    def weigh(self, piece: Piece, part: float, count: float | None, first: bool, reduction: str) -> float:
        if first:
            self._count = count
            self._count_in(piece, count)
        self._reducer.check_sync(piece.last and self.sums)
        if not part:
            return 0.0
        if reduction == GLOBAL:
            self._count = part
        elif reduction == SUM:  # the hook applies the weight of a mean
            self._count = max(piece.samples if count is None else count, 1)
            return 1.0 / self._count
        return 1.0

    def _sums_next(self) -> bool | None:
        return False  # the hook multiplies what does not belong to a round by zero,

    def _left(self, parameter: torch.nn.Parameter) -> bool:
        return parameter.grad is not None  # which is then a gradient all the same

    @property
    def counted(self) -> bool:
        """Whether the running round's losses come with counts."""
        return bool(self._counts.given)

    def share(self, piece: Piece) -> float:
        """The factor by which the hook multiplies this rank's accumulated gradients."""
        return self._weighed / (piece.batch * self._counts.per_sample)

    def gather(self, piece: Piece) -> None:
        """A micro-step's backward pass begins."""
        # With gradients g_1, g_2 of mean losses over m_1, m_2 samples the round needs (m_1 g_1 + m_2 g_2) / B.
        # Accumulated as g_1 (m_1 / m_2) + g_2, this results from the hook's factor m_2 / B.
        many = piece.samples if self._count is None else self._count
        before, self._count = 0.0 if piece.first else self._weighed, None
        scale = before / many if many and not piece.first else 1.0
        self.bring_back(piece, scale=scale)
        self._weighed = many or before

    def gathered(self, piece: Piece) -> None:
        """A micro-step's backward pass is done."""
        if not piece.last:
            self.put()

    def done(self, piece: Piece) -> None:
        if piece.last:
            super().done(piece)

    def drop(self) -> None:
        super().drop()
        self._count = None


class LocalWeighing(Weighing):
    """Each gradient belongs to one step of this rank: the mean over its batch, without a sum over the ranks.

    interval: called when the first micro-step of a round begins.

    Attributes:
        many: The number that the newest loss is a mean over.
    """

    def __init__(
        self,
        parameters: Sequence[torch.nn.Parameter],
        device: torch.device,
        reducer: Reducer,
        interval: Callable[[], None],
    ) -> None:
        super().__init__(parameters, device, reducer)
        self.sums, self.many, self._interval = False, 0.0, interval
        why = "with LocalSGD each rank steps by itself; "
        self.no_global = f"{why}pass a mean, a sum or count="
        self.no_second = f"{why}make a Pace for each model"

    def begin(self, piece: Piece) -> None:
        if piece.first:
            self._interval()
        super().begin(piece)

    def weigh(self, piece: Piece, part: float, count: float | None, first: bool, reduction: str) -> float:
        if first:
            self.bring_back(piece)
            if piece.first:
                self._counts.begin()
            if piece.samples:  # tokens of one step and samples of another do not add up to a weight
                self._counts.add(piece.step, count, last=False)
            self.many = float(piece.samples if count is None else count)
        return part / self.many if self.many else 0.0

    def done(self, piece: Piece) -> None:
        self.ready()


def held(optimizer: torch.optim.Optimizer) -> Iterator[torch.nn.Parameter]:
    """The optimizer's parameters, in all its groups."""
    for group in getattr(optimizer, "param_groups", ()):
        yield from group["params"]


def put(parameters: Sequence[torch.nn.Parameter], grads: Iterable[torch.Tensor | None] | None = None) -> None:
    """Set the parameters' gradients; without ``grads`` to None."""
    for parameter, grad in zip(parameters, repeat(None) if grads is None else grads, strict=False):
        parameter.grad = grad


def _which(grad: torch.Tensor | None) -> tuple[int, int] | None:
    """Numbers that identify a gradient and its version: they differ after each change. None without a gradient."""
    return None if grad is None else (id(grad), version(grad))
