"""Within the program: autograd functions that put a gradient of their own into the graph of a loss."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import torch

from paceline.attach.places import foreign


def injecting(loss: torch.Tensor) -> Iterator[tuple[str, str, int]]:
    """(class, file, line) of each function of the program in the graph of ``loss`` whose backward pass makes a
    gradient that is not zero of gradients that are: it does not come from the loss, and no weight reaches it."""
    seen: set[Any] = set()
    nodes = [loss.grad_fn]
    while nodes:
        node: Any = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        nodes += [before for before, _ in node.next_functions]
        kind: Any = getattr(node, "_forward_cls", None)
        file = None if kind is None else inspect.getsourcefile(kind)
        if file is not None and not foreign(file) and _makes(kind, node):
            yield kind.__name__, file, inspect.getsourcelines(kind)[1]


def _makes(kind: Any, node: Any) -> bool:
    """Whether the backward pass of this function makes something of nothing. One that fails is taken for innocent."""
    with suppress(Exception), torch.no_grad():
        zeros = [
            torch.zeros(each.shape, dtype=each.dtype, device=each.device) for each in node._input_metadata
        ]
        made = kind.backward(node, *zeros)
        parts = made if isinstance(made, (tuple, list)) else (made,)
        return any(isinstance(part, torch.Tensor) and bool(part.any()) for part in parts)
    return False
