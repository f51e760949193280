"""The gradients of a round in pieces: put aside between the pieces, so that nothing in the loop can touch them.

A loop may zero, clip or step at any turn, as programs do that know nothing of pieces. While a round is under way the
finished pieces' gradients are not in ``p.grad``, which is None: zeroing and clipping do nothing then, and a step is
refused (see ``steps``). They come back just before the next backward pass adds to them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from paceline.errors import PacelineError
from paceline.torch.gradients.steps import held


class Gradients:
    """What became of the gradients of one model, round after round.

    For each piece: ``begin`` before its backward pass, then ``put_aside``, or ``ready`` after a round's last one. For
    each round: ``check_there`` before its step, ``used`` after it; ``drop`` where it is left unfinished.
    """

    def __init__(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        self._parameters = list(parameters)
        self._kept: list[torch.Tensor | None] | None = None  # of the running round's finished pieces
        self._begun = False  # a backward pass of the running round has, and may have been left in its middle
        self._had: list[
            torch.nn.Parameter
        ] = []  # parameters that have a gradient of the round that is complete
        self._used: list[tuple[int, int] | None] | None = None  # identity and version after the last step
        self._passed = False  # another model's backward pass has perhaps left something here since

    def begin(self, step: int, scale: float = 1.0) -> None:
        """A backward pass of round ``step`` begins: what was gathered before it comes back, times ``scale``.

        Raises PacelineError where a gradient is there that is not of this round.
        """
        kept, self._kept, self._begun = self._kept, None, True
        if self._passed:
            self._passed = False
            if any(p.grad is not None and bool(p.grad.any()) for p in self._parameters):
                raise PacelineError(
                    f"round {step}: the backward pass of another model has left gradients in this one, which would "
                    "count here; expected this model to be zeroed before pace.backward(loss)"
                )
        if kept is None:
            self._check_fresh(step)
            return
        if any(p.grad is not None for p in self._parameters):
            raise PacelineError(
                f"round {step}: gradients were added to the model between two pieces of the round; expected those of "
                "pace.backward(loss) alone: call it instead of loss.backward(), once for each piece"
            )
        if scale != 1.0:
            torch._foreach_mul_([g for g in kept if g is not None], scale)
        for parameter, grad in zip(self._parameters, kept, strict=True):
            parameter.grad = grad

    def put_aside(self) -> None:
        """The backward pass of a piece is through, and another piece follows."""
        self._kept = [p.grad for p in self._parameters]
        for parameter in self._parameters:
            parameter.grad = None

    def ready(self) -> None:
        """The round's gradients are complete."""
        self._had = [p for p in self._parameters if p.grad is not None]

    def check_there(self, step: int, optimizers: Iterable[torch.optim.Optimizer]) -> None:
        """Raises PacelineError where all gradients that an optimizer is to use have gone since ``ready``."""
        for optimizer in optimizers:
            if any(
                p.grad is not None
                for group in getattr(optimizer, "param_groups", ())
                for p in group["params"]
            ):
                continue
            had = {id(p) for p in self._had}
            if any(id(p) in had for p in held(optimizer)):
                raise PacelineError(
                    f"round {step}: the gradients were zeroed between pace.backward(loss) and the optimizer's step; "
                    "call zero_grad() before the backward pass, or leave it out, since pace.step(optimizer) zeroes"
                )

    def used(self) -> None:
        """The round's step was taken, or left out on purpose."""
        left = any(
            p.grad is not None for p in self._parameters
        )  # else nothing is there that could be counted again
        self._used = [_which(p.grad) for p in self._parameters] if left else None
        self._had, self._begun = [], False

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

    def _check_fresh(self, step: int) -> None:
        used, self._used = self._used, None
        if used is None:
            return
        left = [p.grad for p, before in zip(self._parameters, used, strict=True) if before == _which(p.grad)]
        if any(grad is not None and bool(grad.any()) for grad in left):  # else they were zeroed in place
            raise PacelineError(
                f"round {step}: gradients of the round before are still in the model when the backward pass begins, "
                "and would be counted again; expected each optimizer to be stepped and zeroed once a round: "
                "pace.step(optimizer) does both, pace.step([one, other]) for several optimizers"
            )


def _which(grad: torch.Tensor | None) -> tuple[int, int] | None:
    """Another number for each gradient, and for each change to it."""
    return None if grad is None else (id(grad), grad._version)
