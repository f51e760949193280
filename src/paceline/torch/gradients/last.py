"""When the last gradient of a backward pass is there, and the pass has not waited for other ranks yet."""

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
        self._prehook: Any = None  # of the running pass
        self._pass = -1  # torch's number of it
        self._within = self._apart = False  # gradients came in the pass of the loss; in another one
        self._hook()

    def begins(self, loss: torch.Tensor) -> None:
        """The backward pass through this loss follows at once, on this thread."""
        if self._prehook is not None:
            self._unhook()
        self._pass = -1
        if loss.requires_grad:
            first = loss.grad_fn
            self._prehook = (
                loss.register_hook(self._queue) if first is None else first.register_prehook(self._queue)
            )

    def ended(self) -> None:
        """A round's last backward pass is through, of which ``begins`` may have told."""
        hook, self._prehook = self._prehook, None
        if hook is not None:
            hook.remove()
        if hook is None or self._pass < 0:
            self._hook()  # a host runs the passes, through another loss
        elif self._hooks is not None and self._within and not self._apart:
            self._hooks.remove()
            self._hooks = None

    def remove(self) -> None:
        """Let go of the model."""
        self._unhook()
        if self._hooks is not None:
            self._hooks.remove()

    def _hook(self) -> None:
        if self._hooks is None:
            self._hooks = torch.autograd.graph.register_multi_grad_hook(self._parameters, self._gradients)

    def _unhook(self) -> None:
        """``begins`` has left a pass that did not come to its end, or the pass is over."""
        hook, self._prehook = self._prehook, None
        if hook is not None:
            hook.remove()

    def _queue(self, *_: object) -> None:
        self._pass = torch._C._current_graph_task_id()
        torch.autograd.Variable._execution_engine.queue_callback(self._told)

    def _gradients(self, _: object) -> None:
        if self._prehook is not None:
            within = torch._C._current_graph_task_id() == self._pass
            self._within, self._apart = self._within or within, self._apart or not within
        self._told()
