"""When a backward pass is through, and the last gradient is there."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch


class LastGradient:
    """Calls ``told`` when a backward pass is through, perhaps several times.

    A hook of each parameter tells of any pass, and costs each of them some microseconds. If the loss is known that
    the pass goes through (``begins`` before it, ``ended`` after it), one callback does: those that are queued in a
    pass are called one after the other when it is through, and DDP's, which waits for other ranks, is queued later.

    That does not hold where parameters get their gradients in a pass of their own within the pass, as under
    ``torch.utils.checkpoint`` with ``use_reentrant=True``: DDP may wait at the end of that one. So the first pass has
    the hooks as well, and they stay unless all of them were called in the pass of the loss.
    """

    def __init__(self, parameters: Sequence[torch.nn.Parameter], told: Callable[[], None]) -> None:
        self._parameters, self._told = parameters, told
        self._hooks: Any = None
        self._begun = False  # a pass through a loss that is known
        self._pass = -1  # torch's number of it
        self._within = self._apart = False  # gradients came in the pass of the loss; in another one
        self._hook()

    def begins(self, loss: torch.Tensor) -> None:
        """The backward pass through this loss follows at once, on this thread."""
        first = loss.grad_fn
        self._begun, self._pass = first is not None, -1
        if first is not None:
            first.register_prehook(self._queue)  # it stays with the loss, and does nothing in other passes

    def ended(self) -> None:
        """A round's last backward pass is through, of which ``begins`` may have told."""
        begun, self._begun = self._begun, False
        if not begun or self._pass < 0:
            self._hook()  # a host runs the passes, through another loss
        elif self._hooks is not None and self._within and not self._apart:
            self._hooks.remove()
            self._hooks = None

    def remove(self) -> None:
        """Let go of the model."""
        self._begun = False
        if self._hooks is not None:
            self._hooks.remove()

    def _hook(self) -> None:
        if self._hooks is None:
            self._hooks = torch.autograd.graph.register_multi_grad_hook(self._parameters, self._gradients)

    def _queue(self, *_: object) -> None:
        if self._begun and self._pass < 0:
            self._pass = torch._C._current_graph_task_id()
            torch.autograd.Variable._execution_engine.queue_callback(self._told)

    def _gradients(self, _: object) -> None:
        if self._begun:
            within = torch._C._current_graph_task_id() == self._pass
            self._within, self._apart = self._within or within, self._apart or not within
        self._told()
