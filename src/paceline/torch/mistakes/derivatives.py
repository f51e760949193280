"""What the tests of a loss derive it by: the outputs of one half of the samples, against those of the others."""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from paceline.torch import hooks_of_torch

DISTANCES = "Cdist", "EuclideanDist", "Pdist"
# Other nodes whose gradient torch cannot derive again.
ONCE = "CtcLoss", "MultiMarginLoss", "MultilabelMarginLoss", "ScaledDotProduct", "SegmentReduce"
ELEMENTS = 1 << 23  # of the differences behind a node of distances, at most


def halves(like: torch.Tensor, dim: int, samples: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights of a tensor's elements, all different: for some samples of the first half, and for others.

    Each is 0 for all other elements. The dimension has a row for each sample, or several: those of one sample may
    follow each other or lie ``samples`` apart. In neither order has a sample elements of both.
    """
    rows, half = like.shape[dim], samples // 2
    each = rows // samples
    row = torch.arange(rows, device=like.device).view(-1, *[1] * (like.dim() - dim - 1))
    weights = 1.5 + torch.arange(like.numel(), device=like.device, dtype=torch.float32).sin() / 2
    weights = weights.view(like.shape).to(like.dtype)
    others = (row >= -(-half // each) * each) & (row % samples >= half)
    return weights * (row < half), weights * others


@contextmanager
def derivable(nodes: Collection[Any]) -> Iterator[None]:
    """Within, gradients of distances have a derivative, and those of other nodes without one count as constant."""
    handles = [
        node.register_hook(
            functools.partial(_of_distances, node) if node.name().startswith(DISTANCES) else _constant
        )
        for node in nodes
        if node.name().startswith((*DISTANCES, *ONCE))
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _constant(given: Any, _: Any) -> Any:
    return tuple(each if each is None else each.detach() for each in given)


def _of_distances(node: Any, given: Any, grads: Any) -> Any:
    """The gradient of distances by hand; 0 at a distance of 0."""
    rows, norm = hooks_of_torch.distances(node)
    if grads[0] is None or grads[0].numel() * rows[0].shape[-1] > ELEMENTS:
        return None if node.name().startswith("Euclidean") else _constant(given, grads)
    with torch.enable_grad():
        rows = [each.view_as(each) for each in rows]  # the same tensor twice has two gradients
        if len(rows) == 1:
            left, right = torch.triu_indices(len(rows[0]), len(rows[0]), 1, device=rows[0].device)
            apart = rows[0][left] - rows[0][right]
        else:
            apart = rows[0].unsqueeze(-2) - rows[1].unsqueeze(-3)
        apart = apart.masked_fill((apart == 0).all(-1, keepdim=True), 1.0)
        lengths = torch.linalg.vector_norm(apart, norm, -1)
        needed = [each for each in rows if each.requires_grad]
        slopes = iter(torch.autograd.grad([lengths], needed, [grads[0]], create_graph=True))
    return tuple(next(slopes) if each.requires_grad else None for each in rows)
