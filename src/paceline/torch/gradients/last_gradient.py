"""When a backward pass is through, and the last gradient is there."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import torch

_running_pass, _ENGINE = torch._C._current_graph_task_id, torch.autograd.Variable._execution_engine


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
        # torch's number of the pass through a loss that is known, -1 until it begins
        self._pass: int | None = None
        self._within = self._apart = False  # gradients came in the pass of the loss; in another one
        self._hook()

    def begins(self, loss: torch.Tensor) -> None:
        """The backward pass through this loss follows at once, on this thread."""
        first = loss.grad_fn
        self._pass = None if first is None else -1
        if first is not None:
            # As ``loss.register_hook``, without the handle for its removal, which costs more than all the rest: it
            # stays with the loss, and does nothing in other passes.
            hooks: Any = loss._backward_hooks
            if hooks is None:
                loss._backward_hooks = hooks = OrderedDict()
                first._register_hook_dict(loss)
            hooks[id(self)] = self._queue

    def ended(self) -> None:
        """A round's last backward pass is through, of which ``begins`` may have told."""
        number, self._pass = self._pass, None
        if number is None or number < 0:
            self._hook()  # a host runs the passes, through another loss
        elif self._hooks is not None and self._within and not self._apart:
            self._hooks.remove()
            self._hooks = None

    def remove(self) -> None:
        """Let go of the model."""
        self._pass = None
        if self._hooks is not None:
            self._hooks.remove()

    def _hook(self) -> None:
        if self._hooks is None:
            self._hooks = torch.autograd.graph.register_multi_grad_hook(self._parameters, self._gradients)

    def _queue(self, *_: object) -> None:
        if self._pass == -1:
            self._pass = _running_pass()
            _ENGINE.queue_callback(self._told)

    def _gradients(self, _: object) -> None:
        if self._pass is not None:
            within = _running_pass() == self._pass
            self._within, self._apart = self._within or within, self._apart or not within
        self._told()
