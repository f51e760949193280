"""The gradients of a filler sample, which stands in for the work of a rank without any: they are zero.

A weight of 0 is not enough: where a layer divides by the deviation over the batch, as a norm written by hand, the
gradient of one sample is infinite or NaN, and so is 0 times it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch

from paceline.torch.hooks_of_torch import accumulates, at_end_of_pass


class Filler:
    """Has the backward pass of a filler sample add zeros to the gradients of these parameters: ``begin`` before it,
    or ``follow`` with its loss, for all parameters that the loss is made of. It ends by itself, or by ``end`` if it
    may have reached none of them."""

    def __init__(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        self._parameters, self._hooks = parameters, list[Any]()
        self._noticed = False  # the pass has come to a parameter

    def begin(self) -> None:
        """The next pass is that of a filler sample."""
        self._begin(self._parameters)

    def follow(self, loss: torch.Tensor) -> None:
        """A pass from this loss of a filler sample, when it comes, is one of a filler sample."""
        if loss.grad_fn is not None:
            loss.register_hook(lambda _: self._begin([*_leaves(loss)]))

    def _begin(self, parameters: Sequence[torch.Tensor]) -> None:
        self.end()
        self._noticed = False
        trained = [p for p in parameters if p.requires_grad]
        nodes = [torch.autograd.graph.get_gradient_edge(p).node for p in trained]
        self._hooks = [p.register_hook(partial(self._zeros, n)) for p, n in zip(trained, nodes, strict=True)]

    def end(self) -> None:
        """It is over, or left out."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def _zeros(self, node: Any, gradient: torch.Tensor) -> torch.Tensor | None:
        if not accumulates(node):
            return None  # a penalty on the gradient is made of it
        if not self._noticed:
            self._noticed = True
            at_end_of_pass(self.end)
        return torch.zeros_like(gradient)


def _leaves(loss: torch.Tensor) -> Iterator[torch.Tensor]:
    """The parameters that the graph of a loss leads to."""
    nodes: list[Any] = [loss.grad_fn]
    seen = set[Any](nodes)
    while nodes:
        node = nodes.pop()
        if (variable := getattr(node, "variable", None)) is not None:
            yield variable
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                nodes.append(following)
