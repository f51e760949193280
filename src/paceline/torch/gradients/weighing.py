"""A model's gradients: weighed, gathered piece by piece, and reduced once a round.

DDP averages over n ranks, so a micro-batch of m samples with a mean loss is weighed by n m / B (LB-BSP, weighted
aggregation: g = (1/X) sum_i |B_i| g_i). Under the hook it is DDP's sum that is weighed instead.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from operator import attrgetter, is_not
from typing import Any

import torch
import torch.distributed as dist

from paceline.errors import PacelineError
from paceline.torch import peers
from paceline.torch.gradients.reducers import Reducer
from paceline.torch.gradients.same_bits import ExactSum
from paceline.torch.gradients.steps import held
from paceline.torch.plan import Piece

_GRAD, _THERE = attrgetter("grad"), partial(is_not, None)  # these run in C, once a round for each parameter


class GradientStash:
    """What became of the gradients of one model, round after round.

    For each piece: ``bring_back`` before its backward pass, then ``put``, or ``ready`` after a round's last one. For
    each round: ``check_there`` before its step, ``used`` after it; ``drop`` where it is left unfinished.
    """

    def __init__(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        self._parameters = list(parameters)
        self._kept: list[torch.Tensor | None] | None = None  # of the running round's finished pieces
        # A pass adds to what was gathered when it is through, so that it can be taken back.
        self.apart = False
        self._begun = False  # a backward pass of the running round has, and may have been left in its middle
        self._had: list[bool] = []  # which parameters had gradients when the newest round was complete
        self._used: list[tuple[int, int] | None] | None = None  # identity and version after the last step
        self._passed = False  # another model's backward pass has perhaps left something here since

    def bring_back(self, step: int, scale: float = 1.0, apart: bool = False) -> None:
        """A backward pass of round ``step`` begins: what was gathered before it comes back, times ``scale``; if the
        pass runs ``apart``, with ``join`` alone.

        Raises PacelineError if a gradient is there that is not of this round.
        """
        self._begun = True
        if self._passed:
            self._passed = False
            if any(p.grad is not None and bool(p.grad.any()) for p in self._parameters):
                raise PacelineError(
                    f"round {step}: the backward pass of another model has left gradients in this one, which would "
                    "count here; expected this model to be zeroed before pace.backward(loss)"
                )
        if (kept := self._kept) is None:
            if self._used is not None:
                self._check_fresh(step, self._used)
                self._used = None
            return
        if any(p.grad is not None for p in self._parameters):
            raise PacelineError(
                f"round {step}: gradients were added to the model between two pieces of the round; expected those of "
                "pace.backward(loss) alone: call it instead of loss.backward(), once for each piece"
            )
        if apart:
            return
        self._kept = None
        if scale != 1.0:
            torch._foreach_mul_([g for g in kept if g is not None], scale)
        for parameter, grad in zip(self._parameters, kept, strict=True):
            parameter.grad = grad

    def join(self) -> None:
        """A backward pass is through: what was gathered apart from it is added."""
        kept = self._kept
        if self.apart and kept is not None:
            self._kept = None
            for parameter, before in zip(self._parameters, kept, strict=True):
                if before is not None:
                    parameter.grad = before if parameter.grad is None else before.add_(parameter.grad)

    def take_back(self) -> None:
        """A backward pass that ran apart has failed: what it has left here does not count."""
        for parameter in self._parameters:
            parameter.grad = None

    def put(self) -> None:
        """The backward pass of a piece is through, and another piece follows."""
        self._kept = [p.grad for p in self._parameters]
        for parameter in self._parameters:
            parameter.grad = None

    def ready(self) -> None:
        """The round's gradients are complete."""
        self._had = list(map(_THERE, map(_GRAD, self._parameters)))

    def check_there(self, piece: Piece, optimizers: Iterable[torch.optim.Optimizer]) -> None:
        """Raises PacelineError if all gradients that an optimizer is to use have gone since ``ready``."""
        if self._had == list(map(_THERE, map(_GRAD, self._parameters))):
            return
        for optimizer in optimizers:
            for group in getattr(optimizer, "param_groups", ()):
                if any(map(_THERE, map(_GRAD, group["params"]))):
                    break
            else:
                had = {id(p) for p, there in zip(self._parameters, self._had, strict=False) if there}
                if not any(id(p) in had for p in held(optimizer)):
                    continue
                raise PacelineError(
                    f"round {piece.step}: the gradients were zeroed between pace.backward(loss) and the optimizer's "
                    "step; call zero_grad() before the backward pass, or leave it out, since pace.step(optimizer) "
                    "zeroes"
                )

    def used(self) -> None:
        """The round's step was taken, or left out on purpose."""
        left = any(map(_THERE, map(_GRAD, self._parameters)))  # else nothing could be counted again
        self._used = [_which(p.grad) for p in self._parameters] if left else None
        self._begun = False

    def another(self) -> None:
        """The backward pass of another model follows, perhaps through this one."""
        self._passed = True

    def drop(self) -> None:
        """The running round is left unfinished: nothing of it counts."""
        if self._begun or self._kept is not None:
            for parameter in self._parameters:
                parameter.grad = None
        self._kept, self._used, self._had, self._begun = None, None, [], False

    def there(self) -> bool:
        """Whether a gradient has come since the last step; zeros are none."""
        used = self._used or [None] * len(self._parameters)
        now = zip(self._parameters, used, strict=True)
        return any(
            p.grad is not None and _which(p.grad) != before and bool(p.grad.any()) for p, before in now
        )

    def finite(self) -> bool:
        """True when no gradient holds an infinity or NaN."""
        grads = [p.grad for p in self._parameters if p.grad is not None]
        return all(bool(torch.isfinite(g).all()) for g in grads)

    def scale(self, factor: float | torch.Tensor) -> None:
        """Multiply the gradients by a number, or by a tensor with one, shape ()."""
        torch._foreach_mul_([p.grad for p in self._parameters if p.grad is not None], factor)

    def _check_fresh(self, step: int, used: list[tuple[int, int] | None]) -> None:
        left = [p.grad for p, before in zip(self._parameters, used, strict=True) if before == _which(p.grad)]
        if any(grad is not None and bool(grad.any()) for grad in left):  # else they were zeroed in place
            raise PacelineError(
                f"round {step}: gradients of the round before are still in the model when the backward pass begins, "
                "and would be counted again; expected each optimizer to be stepped and zeroed once a round: "
                "pace.step(optimizer) does both, pace.step([one, other]) for several optimizers"
            )


class Weighing(GradientStash):
    """For each micro-step ``begin``, then ``weigh`` before its backward pass and ``done`` after it (under the hook
    ``gather`` and ``gathered``); ``used`` when a round is over, ``drop`` where it is left unfinished.

    by_hook: DDP's communication hook weighs the gradients, not a loss. exact: they are summed without rounding.
    varies: how many samples of a round are run is known at its end. counted: what its losses are means over, on all
        ranks together, once its last gradient is there; None if nobody knows it by then.
    """

    def __init__(
        self,
        parameters: Sequence[torch.nn.Parameter],
        device: torch.device,
        reducer: Reducer,
        *,
        by_hook: bool,
        exact: bool,
        varies: bool = False,
        counted: Callable[[int], float | None] = lambda step: None,
    ) -> None:
        self._reducer, self._by_hook, self._varies = reducer, by_hook, varies
        self._ranks = peers.ranks() if reducer.averages else 1
        self.sums = reducer.averages or reducer.travels  # over the ranks, in a round's last backward pass
        self.exact = exact
        self._sum = ExactSum(parameters) if exact else None
        self._averaged = 1 if exact else self._ranks  # by which DDP divides
        super().__init__(parameters)
        self._counts = Counts(device, counted)
        self.entered: AbstractContextManager[Any] | None = None  # in which gradients stay on this rank
        # Under the hook: what the coming piece's gradient is a mean over, if that is not its samples, and what the
        # gradients gathered so far are.
        self._count: float | None = None
        self._weighed = 0.0

    def begin(self, piece: Piece) -> None:
        """A micro-step begins that is not the round's only one; gradients are only reduced over the ranks in the
        last."""
        self.release()
        if not piece.last or self._sum is not None:
            self.entered = self._reducer.no_sync()
            self.entered.__enter__()

    def weigh(self, piece: Piece, count: float | None) -> None:
        """The first backward pass of a micro-step begins, whose loss is over ``count`` where that is not its
        samples."""
        if not self._by_hook:
            self.bring_back(piece.plan.step, apart=self.apart and not (piece.last and self.sums))
        else:
            self._count = count
        if (count is not None or not piece.last or self._counts.given) and not self._reducer.travels:
            self._counts.add(piece.step, count, piece.last)

    def count_back(self, step: int, count: float) -> None:
        """A backward pass that ran apart has failed, whose loss was over ``count``."""
        if not self._reducer.travels:
            self._counts.add(step, -count, False)

    def weight(self, piece: Piece, part: float) -> float:
        """What a loss counts whose part of the round is ``part`` samples, where no hook weighs it."""
        return self._averaged * part / piece.plan.batch

    def done(self, piece: Piece) -> None:
        """The micro-step's backward pass is through. Collective after a round's last."""
        if self._sum is not None:
            self._sum.add()
            if piece.last:
                self._sum.finish()
        if piece.last:
            given = self._counts.given
            if given or self._varies:
                self.scale(self._counts.factor(piece.step, piece.batch))
            elif given is not None:
                self._counts.begin()
            self.ready()
        elif self._sum is None and not self._by_hook:
            self.put()

    def share(self, piece: Piece) -> float:
        """What the hook multiplies this rank's gathered gradients by."""
        return self._weighed / piece.batch

    def gather(self, piece: Piece) -> None:
        """Under the hook, a micro-step's backward pass begins."""
        # With mean losses g_1, g_2 over m_1, m_2 samples the round needs (m_1 g_1 + m_2 g_2) / B. Gathered as
        # g_1 (m_1 / m_2) + g_2, the hook's m_2 / B gives just that.
        many = piece.samples if self._count is None else self._count
        before, self._count = 0.0 if piece.first else self._weighed, None
        scale = before / many if many and not piece.first else 1.0
        self.bring_back(piece.step, scale)
        self._weighed = many or before

    def gathered(self, piece: Piece) -> None:
        """Under the hook, a micro-step's backward pass is through."""
        if not piece.last:
            self.put()

    def drop(self) -> None:
        super().drop()
        self._count = None
        self._counts.begin()

    def release(self) -> None:
        """The model reduces its gradients again as it did."""
        entered, self.entered = self.entered, None
        if entered is not None:
            entered.__exit__(None, None, None)


def _which(grad: torch.Tensor | None) -> tuple[int, int] | None:
    """Another number for each gradient, and for each change to it."""
    return None if grad is None else (id(grad), grad._version)


def checked_count(count: Any) -> float:
    """A count as the user gave it, a number or a tensor with one. Raises PacelineError for what is none."""
    try:
        value = float(count)
    except (TypeError, ValueError, RuntimeError):
        value = math.nan
    if not (math.isfinite(value) and value >= 0):
        raise PacelineError(
            f"count={count!r}: expected what the loss is a mean over, a number that is at least 0"
        )
    return value


class Counts:
    """What is counted in one round, over its pieces and all ranks, where losses are means over something other than
    samples: tokens, nodes of a graph, pixels that count.

    Their gradient is the sum over all that is counted, over its number in the whole round. That number is known to
    nobody before the last piece of the round is drawn: until then the number of samples stands for it, and the
    gradients are put right at the round's end (LB-BSP's weighted aggregation, with tokens for samples).
    """

    def __init__(self, device: torch.device, counted: Callable[[int], float | None]) -> None:
        self._device, self._counted = device, counted
        self.begin()

    def begin(self) -> None:
        """A round begins."""
        self._own = 0.0
        self.given: bool | None = None  # whether the round's pieces come with a count
        self._total: torch.Tensor | None = None
        self._work: Any = None

    def add(self, step: int, count: float | None, last: bool) -> None:
        """A piece's backward pass begins, the last of the round where ``last``. On a device collective there, without
        a wait; the numbers of processors come with the ranks' measurements."""
        given = count is not None
        if self.given is not given and self.given is not None:
            raise PacelineError(
                f"round {step}: one piece was given a count and another was not; expected count= with each or none"
            )
        self.given = given
        self._own += count or 0.0
        if given and last and self._device.type != "cpu":
            self._total = torch.tensor([self._own], dtype=torch.float64, device=self._device)
            if peers.ranks() > 1:
                self._work = dist.all_reduce(self._total, async_op=True)

    def factor(self, step: int, batch: int) -> float | torch.Tensor:
        """By what the round's gradients are to be multiplied, if something other than samples is counted. Collective.

        On a device it is a tensor there, shape (), so that the host need not wait until it is known.
        """
        total = self._total
        if total is None:
            counted = self._counted(step)
            self.begin()
            assert counted is not None
            return batch / counted if counted else 0.0
        if self._work is not None:
            self._work.wait()  # for a sum that was on its way before the gradients; on a device the stream waits
        self.begin()
        return torch.where(total > 0, batch / total, 0.0)[0]
