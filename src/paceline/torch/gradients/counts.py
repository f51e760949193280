"""What the losses of a round are means over, if that is not its samples: its count, over its pieces and all ranks."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from paceline.errors import PacelineError
from paceline.torch import peers


def checked_count(count: Any) -> float:
    """The user's count, a number or a tensor with one, as a float. Raises PacelineError for anything else."""
    try:
        value = math.nan if isinstance(count, str | bytes) else float(count)
    except (TypeError, ValueError, RuntimeError):
        value = math.nan
    if not (math.isfinite(value) and value >= 0):
        raise PacelineError(
            f"count={count!r}: expected what the loss is a mean over, a number that is at least 0"
        )
    return value


class Counts:
    """The count of one round, over its pieces and all ranks, if losses are means over something other than samples:
    tokens, nodes of a graph, pixels that count.

    The round's gradient is the sum over everything counted, divided by its number in the whole round. That number is
    unknown before the last piece of the round is drawn: until then the number of samples takes its place, times
    ``per_sample``, and the gradients are corrected at the round's end (LB-BSP's weighted aggregation, with tokens for
    samples). Without ``per_sample`` gradients would be as many times too large until then as a sample has tokens, and
    overflow in float16. A power of two changes no digit of theirs.

    Attributes:
        given: Whether the round's pieces come with a count.
        per_sample: About the count of a sample, as it was when the round began; 1 if nothing is counted.
    """

    def __init__(
        self,
        device: torch.device,
        counted: Callable[[int], float | None],
        per_sample: Callable[[], float] = lambda: 1.0,
    ) -> None:
        self._device, self._counted, self._newest = device, counted, per_sample
        self.begin()

    def begin(self) -> None:
        """Forget the count of the round before."""
        self._own = 0.0
        self.given: bool | None = None
        self.per_sample = 1.0
        self._total: torch.Tensor | None = None
        self._work: Any = None

    def add(self, step: int, count: float | None, last: bool) -> None:
        """A piece's backward pass begins; ``last``: it is the round's last, in which this is collective on a device,
        without a wait. On a CPU the counts travel with the ranks' measurements."""
        given = count is not None
        if self.given is not given and self.given is not None:
            raise PacelineError(
                f"round {step}: one piece was given a count and another was not; expected count= with each or none"
            )
        if given and self.given is None:
            self.per_sample = self._newest()
        self.given = given
        self._own += count or 0.0
        if given and last and self._device.type != "cpu":
            self._total = torch.tensor([self._own], dtype=torch.float64, device=self._device)
            if peers.ranks() > 1:
                self._work = dist.all_reduce(self._total, async_op=True)

    def factor(self, step: int, batch: int) -> float | torch.Tensor:
        """The factor that corrects the round's gradients, if something other than samples is counted. Collective.

        On a device it is a tensor, shape (), so that the host does not wait until it is known.
        """
        total, taken = self._total, batch * self.per_sample
        if total is None:
            counted = self._counted(step)
            self.begin()
            assert counted is not None
            return taken / counted if counted else 0.0
        if self._work is not None:
            self._work.wait()  # the sum began before the gradients' own; on a device only the stream waits
        self.begin()
        return torch.where(total > 0, taken / total, 0.0)[0]
