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
    """Has the backward passes of a filler sample add zeros to the gradients of these parameters: ``begin`` with its
    micro-step, ``again`` before a further pass, and ``follow`` with each loss, for all parameters that it is made of.
    A pass ends by itself, or by ``end`` if it may have reached none of them."""

    def __init__(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        self._parameters, self._hooks = parameters, list[Any]()
        self._noticed = False  # the pass has come to a parameter
        self._valued = False  # a loss of the micro-step counts all the same

    def begin(self) -> None:
        """A filler sample's micro-step begins."""
        self._valued = False
        self._begin(self._parameters)

    def again(self) -> None:
        """Another pass of the micro-step follows."""
        self._begin(self._parameters)

    def follow(self, loss: torch.Tensor) -> None:
        """The next pass from this loss, when it comes, is one of the filler sample."""
        if loss.grad_fn is None:
            return
        ahead = [[*_leaves(loss.grad_fn)]]  # a hook that held the loss would keep its graph

        def begins(_: torch.Tensor) -> None:
            if ahead:
                self._begin(ahead.pop())

        loss.register_hook(begins)

    def counts(self) -> None:
        """A loss of the micro-step is one over the samples of all ranks: what it leaves must stay."""
        self._valued = True
        self.end()

    def _begin(self, parameters: Sequence[torch.Tensor]) -> None:
        self.end()
        if self._valued:
            return
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


def _leaves(end: Any) -> Iterator[torch.Tensor]:
    """The parameters that the graph leads to from its last node, that of a loss."""
    nodes = [end]
    seen = set[Any](nodes)
    while nodes:
        node = nodes.pop()
        if (variable := getattr(node, "variable", None)) is not None:
            yield variable
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                nodes.append(following)
