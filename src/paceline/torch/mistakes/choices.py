"""Finds losses that choose among the samples of a micro-batch, such as the hardest ones, or sort them, or have a kink
at a value of several samples: the largest losses of a part of a batch are not those of the batch.

A node chooses among samples if what it chooses one value from depends on samples of both halves. So the choice of a
maximum among the classes of each sample is none. A kink is a choice between two values for each element.
"""

from __future__ import annotations

import functools
import math
import operator
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.autograd.graph import GradientEdge

from paceline.torch import hooks_of_torch
from paceline.torch.mistakes.derivatives import halves

CHOOSES = (
    *("Amax", "Amin", "Cummax", "Cummin", "Kthvalue", "MaxBackward", "Median", "MinBackward", "Mode"),
    *("Nanmedian", "SortBackward", "Topk"),
)
KINKS = (
    *("Abs", "Clamp", "Fmax", "Fmin", "Hardshrink", "Hardsigmoid", "Hardtanh", "HuberLoss", "LeakyRelu"),
    *("Maximum", "Minimum", "Prelu", "Relu", "SmoothL1Loss", "Softshrink", "Threshold"),
)
MOST = 1 << 22  # elements that the nodes of a loss choose from, at most: the smallest are looked at
COUNTS = 1e-5  # a slope that counts, relative to the largest one
Edge = tuple[Any, int]  # a node, and the number of its output
Reached = Mapping[Edge, tuple[torch.Tensor, torch.Tensor]]


def chooses(
    loss: Any, nodes: Collection[Any], outputs: Sequence[Any], dims: Sequence[int], samples: int
) -> bool:
    """Whether a loss chooses among samples.

    Args:
        loss: A tensor of one number, or its edge in the graph, which is kept.
        nodes: Of the graph between the loss and the outputs.
        outputs: Tensors that the loss is computed from, or edges.
        dims: Of each output, the dimension of the samples, as for ``halves``.
        samples: Number of samples, at least 2.
    """
    alike = defaultdict[Any, list[Any]](list)  # nodes that choose in the same way from the same tensor
    for node in nodes:
        # A custom function may not run twice.
        custom = isinstance(node, torch.autograd.function.BackwardCFunction)
        if node.name().startswith((*CHOOSES, *KINKS)) and not custom:
            shape = tuple(hooks_of_torch.output_shapes(node)[0])
            alike[node.name(), node.next_functions, shape].append(node)
    try:
        reached = _reached((edge for _, edges, _ in alike for edge in edges), outputs, dims, samples)
        return any(_among(each[0], reached) and _counts(loss, each) for each in alike.values())
    except (RuntimeError, NotImplementedError):  # a part of the graph cannot be run twice
        return False


def _among(node: Any, reached: Reached) -> bool:
    """Whether a node chooses a value from elements that depend on samples of both halves."""
    found = [reached[edge] for edge in node.next_functions if edge in reached]
    if not found:
        return False
    if node.name().startswith(KINKS):
        first, others = (functools.reduce(operator.or_, each) for each in zip(*found, strict=True))
    else:
        ((first, others),) = found
        dims = hooks_of_torch.dims(node, first.dim())
        if all(first.shape[dim] == 1 for dim in dims):
            return False
        first, others = first.any(dims), others.any(dims)
    return bool((first & others).any())


def _reached(edges: Iterable[Edge], outputs: Sequence[Any], dims: Sequence[int], samples: int) -> Reached:
    """Which elements of some tensors depend on the outputs of the first half of the samples, and on those of others.

    The gradients by the outputs are linear in what is given for the tensors. Their derivative by that, times a change
    of the outputs, is the change of the tensors.
    """
    sizes = {
        edge: math.prod(hooks_of_torch.output_shapes(edge[0])[edge[1]])
        for edge in edges
        if edge[0] is not None
    }
    given, left = dict[Edge, torch.Tensor](), MOST
    for edge, size in sorted(sizes.items(), key=lambda each: each[1]):
        left -= size
        if size and left >= 0:
            given[edge] = hooks_of_torch.zeros_for(*edge).requires_grad_()
    if not given:
        return {}
    by = list(given.values())
    with hooks_of_torch.without_modes(), torch.autograd.set_detect_anomaly(False), torch.enable_grad():
        slopes = torch.autograd.grad(
            [GradientEdge(*edge) for edge in given], outputs, by, create_graph=True, allow_unused=True
        )
        pairs = [
            each for each in zip(slopes, dims, strict=True) if each[0] is not None and each[0].requires_grad
        ]
        if not pairs:
            return {}
        changes = [halves(*each, samples) for each in pairs]
        first, others = (
            torch.autograd.grad(
                [slope for slope, _ in pairs],
                by,
                each,
                retain_graph=True,
                allow_unused=True,
                materialize_grads=True,
            )
            for each in zip(*changes, strict=True)
        )
    return {edge: _large(*each) for edge, each in zip(given, zip(first, others, strict=True), strict=True)}


def _large(*changes: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    one, two = (each.detach().abs().nan_to_num(posinf=0.0) for each in changes)
    least = COUNTS * max(one.max(), two.max())
    return one > least, two > least


def _counts(loss: Any, choices: Sequence[Any]) -> bool:
    """Whether a loss depends on what was chosen: a softmax that subtracts the largest number of all does not."""
    chosen = [GradientEdge(*edge) for edge in choices[0].next_functions if edge[0] is not None]
    by = [*(GradientEdge(node, 0) for node in choices), *chosen]
    with hooks_of_torch.without_modes(), torch.autograd.set_detect_anomaly(False):
        slopes = torch.autograd.grad([loss], by, retain_graph=True, allow_unused=True)
    each, whole = slopes[: len(choices)], slopes[len(choices) :]
    of_choice = sum(slope for slope in each if slope is not None)
    largest = max((float(slope.abs().max()) for slope in whole if slope is not None), default=0.0)
    return float(torch.as_tensor(of_choice).abs().max()) > COUNTS * largest
