"""A second DistributedDataParallel module in a loss that ranks compute in different numbers of passes.

It sums its gradients in each of its backward passes, so that some ranks would wait for ever. Its sums are those of
C++, which ``timing`` does not notice; a hook of its parameters comes before them.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from torch.nn.parallel import DistributedDataParallel

from paceline.errors import PacelineError
from paceline.torch.gradients.reducers import deferred
from paceline.torch.hooks_of_torch import GradientsOfPass
from paceline.torch.mistakes import Check


class SecondModels(Check):
    """Refuses them.

    running: gives the round's number while ranks may run different numbers of passes, else None. how: what takes
    the round in pieces, for the message.
    """

    def __init__(self, running: Callable[[], int | None], how: str) -> None:
        self._running, self._how = running, how
        self._found: list[Any] | None = None  # the hooks of the modules

    def iteration(self, step: int) -> None:
        if self._found is None:  # looking for them takes as long as a garbage collection
            self._found = [
                GradientsOfPass(trained, partial(self._begins, ddp), last=False)
                for ddp in _living(DistributedDataParallel)
                if ddp not in deferred and (trained := [p for p in ddp.parameters() if p.requires_grad])
            ]

    def close(self) -> None:
        for hook in self._found or ():
            hook.remove()
        self._found = []

    def _begins(self, ddp: DistributedDataParallel) -> None:
        step = self._running()
        if step is not None and ddp.require_backward_grad_sync and ddp not in deferred:
            raise PacelineError(
                f"round {step}: a backward pass runs through a second DistributedDataParallel module, of "
                f"{type(ddp.module).__name__}, whose sums would hang since {self._how} runs different numbers of "
                "passes on each rank; wrap both models in one, or use loop='whole'"
            )


def _living(kind: type[Any]) -> Iterator[Any]:
    """All objects of a class and its subclasses."""
    for one in gc.get_referrers(kind):
        if type(one) is kind:
            yield one
    for more in kind.__subclasses__():
        yield from _living(more)
