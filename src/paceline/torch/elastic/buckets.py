"""Sums a model's gradients over the ranks in buckets, while the backward pass still runs.

Copies are summed: each parameter keeps this rank's own gradient until all sums are complete, so that nothing is lost
if one of them fails. Then the copy takes the gradient's place, and is not copied back.

The division into buckets depends only on the parameters, so a rank that has just joined has the same as all others.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from paceline.errors import PacelineError
from paceline.torch.elastic.group import over
from paceline.torch.gradients.reducers import Sums
from paceline.torch.gradients.same_bits import ExactSum
from paceline.torch.hooks_of_torch import storage_uses

FIRST_BYTES, BYTES = 1 << 20, 25 << 20  # of a bucket, as in DistributedDataParallel


class Bucket:
    """Parameters of one dtype and device, whose gradients are summed together."""

    def __init__(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        self.parameters = list(parameters)
        self.waits = 0  # parameters whose gradient is not ready yet
        self.work: Any = None
        self._make()

    def _make(self) -> None:
        first, sizes = self.parameters[0], [p.numel() for p in self.parameters]
        self.flat = torch.empty(sum(sizes), dtype=first.dtype, device=first.device)
        self.views = [
            part.view_as(p) for part, p in zip(self.flat.split(sizes), self.parameters, strict=True)
        ]
        self._own = storage_uses(self.flat)

    def _free(self) -> bool:
        """Whether nothing else uses the memory: a failed sum that still writes; a gradient that was not set to None,
        and was added to; or a gradient that the user has kept."""
        uses = storage_uses(self.flat)
        return over(self.work) and uses is not None and self._own is not None and uses <= self._own

    def begin(self) -> None:
        """A backward pass begins: all its gradients are to come."""
        self.waits = len(self.parameters)

    def ready(self) -> None:
        """A gradient is ready."""
        self.waits -= 1

    def sum(self, start: Callable[[torch.Tensor], Any]) -> None:
        """Copy the gradients, and start the sum of the copies."""
        self._fill()
        self.work = start(self.flat)

    def _fill(self) -> None:
        """Copy the gradients; zeros for those that are None."""
        if not self._free():
            self._make()
        have = [(v, p.grad) for v, p in zip(self.views, self.parameters, strict=True) if p.grad is not None]
        if have:
            torch._foreach_copy_([v for v, _ in have], [g for _, g in have])
        for view, parameter in zip(self.views, self.parameters, strict=True):
            if parameter.grad is None:
                view.zero_()


class Buckets(Sums):
    """Gradients that are summed while the backward pass runs. parameters: of the model, in its order."""

    def __init__(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        self._parameters = list(parameters)
        self._buckets = [Bucket(group) for group in _groups(self._parameters)]
        self._sum: Callable[[torch.Tensor], Any] | None = None  # set while a backward pass is to be summed
        self._next = 0  # the bucket to be summed next
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(self._ready(bucket))
            for bucket in self._buckets
            for parameter in bucket.parameters
        ]

    def begin(self, sum: Callable[[torch.Tensor], Any]) -> None:
        self._sum, self._next = sum, 0
        for bucket in self._buckets:
            bucket.begin()

    def finish(self, sum: Callable[[torch.Tensor], Any]) -> list[Any]:
        """No more gradients will come: start the sums that have not been started. Returns the works of all sums."""
        if self._sum is None:
            self._next = 0
        self._sum = None
        while self._next < len(self._buckets):
            self._start(sum)
        return [bucket.work for bucket in self._buckets]

    def drop(self) -> None:
        self._sum = None

    def used(self) -> list[bool]:
        return [p.grad is not None for p in self._parameters]

    def apply(self, used: Sequence[bool], factor: float = 1.0) -> None:
        """Make the sums, times ``factor``, the gradients. used: whether any rank has a gradient of each parameter."""
        wanted = {id(p) for p, one in zip(self._parameters, used, strict=True) if one}
        for bucket in self._buckets:
            if factor != 1.0:
                bucket.flat.mul_(factor)
            for parameter, view in zip(bucket.parameters, bucket.views, strict=True):
                if id(parameter) in wanted:
                    parameter.grad = view.detach()  # one more reference to the memory while it is in use

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()

    def _ready(self, bucket: Bucket) -> Callable[[torch.Tensor], None]:
        def ready(_: torch.Tensor) -> None:
            sum = self._sum
            if sum is None:
                return
            bucket.ready()
            if bucket.waits < 0:
                raise PacelineError(
                    "a parameter got a gradient twice in one backward pass, after its sum had begun; ElasticPace "
                    "needs models in which each gets one (checkpointing with use_reentrant=False does)"
                )
            while self._next < len(self._buckets) and not self._buckets[self._next].waits:
                self._start(sum)

        return ready

    def _start(self, sum: Callable[[torch.Tensor], Any]) -> None:
        self._buckets[self._next].sum(sum)
        self._next += 1


class ExactBuckets(Sums):
    """Like ``Buckets``, for sums with the same bits for any division: whole numbers, which add without rounding.

    ``add`` after each backward pass takes the gradients from the parameters; the sum begins after the round's last
    backward pass."""

    def __init__(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        self._parameters = list(parameters)
        self._own = ExactSum(parameters)
        self._total: torch.Tensor | None = None

    def add(self) -> None:
        self._own.add()

    def finish(self, sum: Callable[[torch.Tensor], Any]) -> list[Any]:
        """Start the sum. Returns its work."""
        self._total = self._own.gathered().clone()
        return [sum(self._total)]

    def drop(self) -> None:
        self._own.clear()

    def used(self) -> list[bool]:
        return self._own.used()

    def apply(self, used: Sequence[bool], factor: float = 1.0) -> None:
        """Make the sums, times ``factor``, the gradients."""
        assert self._total is not None
        self._own.give(self._total)
        if factor != 1.0:
            torch._foreach_mul_([p.grad for p in self._parameters if p.grad is not None], factor)


def _groups(parameters: Sequence[torch.nn.Parameter]) -> list[list[torch.nn.Parameter]]:
    """Groups of parameters of one dtype and device, the model's last ones first, since their gradients come first."""
    groups: list[list[torch.nn.Parameter]] = []
    kind: Any = None
    held, most = 0, FIRST_BYTES
    for parameter in reversed(parameters):
        size = parameter.numel() * parameter.element_size()
        if (parameter.dtype, parameter.device) != kind or held + size > most:
            most = BYTES if groups else FIRST_BYTES
            groups.append([])
            kind, held = (parameter.dtype, parameter.device), 0
        groups[-1].append(parameter)
        held += size
    return groups
