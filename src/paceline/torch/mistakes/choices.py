"""Finds losses that choose among the samples of a micro-batch, such as the hardest ones, or sort them: the largest
losses of a part of a batch are not those of the batch.

A node chooses among samples if the first half of what it chooses from depends on the first half of the samples, and
the second half on the others. So the choice of a maximum among the classes of each sample is none.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch.autograd.graph import GradientEdge

from paceline.torch import hooks_of_torch

CHOOSES = (
    *("Amax", "Amin", "Cummax", "Cummin", "Kthvalue", "MaxBackward", "Median", "MinBackward", "Mode"),
    *("Nanmedian", "SortBackward", "Topk"),
)
MOST = 4  # nodes of a loss that are looked at
COUNTS = 1e-5  # a slope that counts, relative to the largest one


def chooses(
    loss: Any, nodes: Collection[Any], outputs: Sequence[Any], dims: Sequence[int], samples: int
) -> bool:
    """Whether a loss chooses among samples.

    Args:
        loss: A tensor of one number, or its edge in the graph, which is kept.
        nodes: Of the graph between the loss and the outputs.
        outputs: Tensors that the loss is computed from, or edges.
        dims: Of each output, the dimension of the samples, with one row for each, or several that follow each other.
        samples: Number of samples, at least 2.
    """
    alike = defaultdict[Any, list[Any]](list)  # nodes that choose in the same way from the same tensor
    for node in nodes:
        # A custom function may not run twice.
        custom = isinstance(node, torch.autograd.function.BackwardCFunction)
        if node.name().startswith(CHOOSES) and not custom:
            shape = tuple(hooks_of_torch.output_shapes(node)[0])
            alike[node.name(), node.next_functions[0], shape].append(node)
    try:
        return any(_choose(loss, each, outputs, dims, samples) for each in list(alike.values())[:MOST])
    except (RuntimeError, NotImplementedError):  # a part of the graph cannot be run twice
        return False


def _choose(
    loss: Any, alike: Sequence[Any], outputs: Sequence[Any], dims: Sequence[int], samples: int
) -> bool:
    behind, number = alike[0].next_functions[0]
    chosen = GradientEdge(behind, number)
    shape = hooks_of_torch.output_shapes(behind)[number]
    half = samples // 2
    for dim in hooks_of_torch.dims(alike[0], len(shape)):
        if shape[dim] < samples or shape[dim] % samples:
            continue
        cut = half * (shape[dim] // samples)
        first = _reached(chosen, dim, 0, cut, outputs, dims, samples)
        if not first or max(first) >= half:
            continue
        second = _reached(chosen, dim, cut, shape[dim], outputs, dims, samples)
        if second and min(second) >= half:
            return _counts(loss, [GradientEdge(node, 0) for node in alike], chosen)
    return False


def _reached(
    edge: Any, dim: int, begin: int, end: int, outputs: Sequence[Any], dims: Sequence[int], samples: int
) -> set[int]:
    """The samples on whose outputs these rows of a tensor depend."""
    given = hooks_of_torch.zeros_for(edge.node, edge.output_nr)
    given.narrow(dim, begin, end - begin).fill_(1)
    found = set[int]()
    for slope, rows in zip(_slopes([edge], outputs, [given]), dims, strict=True):
        if slope is not None:
            sizes = slope.movedim(rows, 0).reshape(slope.shape[rows], -1).abs().nan_to_num().amax(1)
            each = len(sizes) // samples
            counts = (sizes > COUNTS * sizes.max()).nonzero().flatten()
            found.update(row // each for row in counts.tolist())
    return found


def _counts(loss: Any, choices: Sequence[Any], chosen: Any) -> bool:
    """Whether a loss depends on what was chosen: a softmax that subtracts the largest number of all does not."""
    *each, whole = _slopes([loss], [*choices, chosen], None)
    if whole is None:
        return False
    of_choice = sum(slope for slope in each if slope is not None)
    return float(torch.as_tensor(of_choice).abs().max()) > COUNTS * float(whole.abs().max())


def _slopes(edges: Sequence[Any], by: Sequence[Any], given: Sequence[torch.Tensor] | None) -> Sequence[Any]:
    with hooks_of_torch.without_modes(), torch.autograd.set_detect_anomaly(False):
        return torch.autograd.grad(edges, by, given, retain_graph=True, allow_unused=True)
