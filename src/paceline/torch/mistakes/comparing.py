"""Finds losses that compare the samples of a micro-batch with each other, by a second derivative, or choose among
them.

In a mean or a sum of the samples' own losses, the gradient by one sample's output does not depend on the outputs of
other samples. The test derives a loss by the outputs of the nearest layers, and not by parameters: it accumulates no
gradient, and calls no hook of a parameter. It does not see

- a choice of samples by values without a gradient, and a statistic without one,
- what is computed before the nearest layers, as by batch norm, or by a compiled or custom function.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch.autograd.graph import GradientEdge

from paceline.torch import hooks_of_torch
from paceline.torch.mistakes.choices import chooses
from paceline.torch.mistakes.derivatives import derivable, halves
from paceline.torch.mistakes.loss_ends import ends
from paceline.torch.plan import Piece

TESTS = 2  # losses that are tested in a run
HEAD = 1000  # nodes between a loss and the nearest layers, at most
DEEP = 20_000  # nodes behind these layers, at most
ELEMENTS = 1 << 23  # of the layers' outputs, at most: a test holds about a dozen copies of them
APART = 1e-5  # a second derivative that counts, relative to the largest one
CHANNELS = "Convolution", "CudnnBatchNorm", "MiopenBatchNorm", "NativeBatchNorm", "NativeGroupNorm"
# Nodes of layers, whatever their weights are, and nodes of layers if one factor is a weight or needs no gradient.
LAYERS = (
    *CHANNELS,
    *("CudnnRnn", "Embedding", "FusedRmsNorm", "MkldnnLinear", "MkldnnRnn", "MiopenRnn", "NativeLayerNorm"),
)
PRODUCTS = "Addmm", "Baddbmm", "Bmm", "Linear", "Mm"
LINEAR = "Addmm", "Mm"  # a linear layer's product; a view gives it the shape of the layer's output
VIEWS = "UnsafeView", "View"
COLLECTIVES = "torch.distributed.nn", "torch.distributed._functional"  # modules of torch
WEIGHTS = "Permute", "TBackward", "ToCopy", "Transpose", "UnsafeView", "View"  # nodes that a weight passes


class Output(NamedTuple):
    """A tensor that a loss is computed from. dims: those that may be the samples'."""

    edge: Any
    shape: Sequence[int]
    dims: tuple[int, ...]


class Comparisons:
    """Tests the first losses of one loop."""

    def __init__(self) -> None:
        self._left = TESTS

    def found(self, loss: torch.Tensor, piece: Piece, summed: Collection[Any] = frozenset()) -> bool:
        """Whether the loss of a piece, whose backward pass has not begun, compares its samples.

        summed: nodes whose outputs were summed over the ranks; a loss of one of them is not tested.
        """
        first = loss.grad_fn
        if self._left <= 0 or piece.samples < 2 or loss.numel() != 1 or first is None:
            return False
        whole = Head(GradientEdge(first, loss.output_nr), piece.samples)
        if whole.single:
            return False
        heads = [whole]
        if whole.parts:
            ended = (end.node for end in ends(loss, piece.samples)[0])
            single = [one for one in ended if one is not None and len(hooks_of_torch.output_shapes(one)) == 1]
            heads += [Head(GradientEdge(node, 0), piece.samples) for node in single]
        heads = [head for head in heads if head.outputs]
        nodes = {node for head in heads for node in head.nodes}
        if not heads or not nodes.isdisjoint(summed) or hooks_of_torch.watched(nodes):
            return False
        self._left -= 1
        return any(head.compares() for head in heads)


class Head:
    """The graph between a loss, or a part of it, and the outputs of the nearest layers.

    Attributes:
        nodes: Of this graph, with those of the layers.
        outputs: That have a row for each of so many samples, or two; empty if the head cannot be tested.
        parts: Whether the parts of the loss may show more than the whole.
        single: Whether each output may be that of a single sample.
    """

    def __init__(self, first: Any, samples: int) -> None:
        self._first, self._samples = first, samples
        self.nodes, self.outputs, self.parts, self.single = set[Any](), list[Output](), False, False
        edges = self._edges()
        if edges is None:
            return
        nearest, many = _nearest([node for node, _ in edges]), 0
        self.parts |= len(nearest) < len({node for node, _ in edges})
        for node, number in edges:
            shape = hooks_of_torch.output_shapes(node)[number]
            if not _of_weights(node, shape):
                many += 1
                if node in nearest and (dims := _dims(node, shape, samples)):
                    self.outputs.append(Output(GradientEdge(node, number), shape, dims))
        # As many outputs as samples may be those of single samples, such as bags, whose rows are something else.
        self.single = many >= samples
        if sum(torch.Size(each.shape).numel() for each in self.outputs) > ELEMENTS:
            self.outputs = []

    def compares(self) -> bool:
        """Whether this part of the loss compares samples: in both dimensions, if either may be the samples'."""
        edges = [each.edge for each in self.outputs]
        ways = [[each.dims[place] for each in self.outputs] for place in (0, -1)]
        ways = ways[: 1 + (ways[0] != ways[1])]
        with derivable(self.nodes):
            return all(mixes(self._first, edges, dims, self._samples) for dims in ways) or all(
                chooses(self._first, self.nodes, edges, dims, self._samples) for dims in ways
            )

    def _edges(self) -> list[tuple[Any, int]] | None:
        """The nodes at which the loss ends, each with the number of its output; None for a graph without a test."""
        found, left = list[tuple[Any, int]](), [(self._first.node, self._first.output_nr)]
        known = set(left)
        while left:
            node, number = left.pop()
            self.nodes.add(node)
            if len(known) > HEAD or _of_ranks(node):
                return None
            if _is_layer(node):
                self.parts |= node.name().startswith("_DDPSink")
                found.append((node, number))
                continue
            for edge in node.next_functions:
                if edge[0] is not None and edge not in known and not hasattr(edge[0], "variable"):
                    known.add(edge)
                    left.append(edge)
        return found


def mixes(loss: Any, outputs: Sequence[Any], dims: Sequence[int], samples: int) -> bool:
    """Whether the gradient of a loss by the outputs of half of the samples depends on those of other samples.

    Args:
        loss: A tensor of one number, or its edge in the graph, which is kept.
        outputs: Tensors that the loss is computed from, or edges.
        dims: Of each output, the dimension of the samples, as for ``halves``.
        samples: Number of samples, at least 2.
    """
    try:
        with hooks_of_torch.without_modes(), torch.autograd.set_detect_anomaly(False), torch.enable_grad():
            slopes = torch.autograd.grad([loss], outputs, create_graph=True, allow_unused=True)
            parts = [
                (slope * halves(slope, dim, samples)[0]).sum()
                for slope, dim in zip(slopes, dims, strict=True)
                if slope is not None and slope.requires_grad
            ]
            if not parts:
                return False
            given = torch.autograd.grad(parts, outputs, retain_graph=True, allow_unused=True)
    except (RuntimeError, NotImplementedError):  # the loss has no second derivative, or no such output
        return False
    largest = apart = 0.0
    for cross, dim in zip(given, dims, strict=True):
        if cross is not None:
            # The derivative of a distance is NaN at a distance of 0.
            sizes = cross.detach().abs().nan_to_num(posinf=0.0)
            largest = max(largest, float(sizes.max()))
            apart = max(apart, float((sizes * (halves(sizes, dim, samples)[1] != 0)).max()))
    return apart > APART * largest


def _dims(node: Any, shape: Sequence[Any], samples: int) -> tuple[int, ...]:
    """The dimensions of a layer's output that may be the samples', with a row or two for each.

    If that is only the second one, the first may have several rows for each.
    """
    if not all(isinstance(size, int) and size for size in shape):
        return ()
    second = len(shape) > 2 and not node.name().startswith(CHANNELS)  # classes and channels are no samples
    dims = tuple(dim for dim, size in enumerate(shape[: 1 + second]) if size in (samples, 2 * samples))
    return (0, 1) if dims == (1,) and shape[0] % samples == 0 else dims


def _nearest(layers: list[Any]) -> set[Any]:
    """Those of some nodes that are not behind another one; none if the graph is too large to know."""
    if len(nearest := set(layers)) < 2:
        return nearest
    known, left = set[Any](), list(nearest)
    while left:
        for node, _ in left.pop().next_functions:
            if node is not None and node not in known:
                known.add(node)
                left.append(node)
        if len(known) > DEEP:
            return set()
    return nearest - known


def _is_layer(node: Any) -> bool:
    """Whether a loss ends at a node: at a layer, or at a custom function, which may not be run twice."""
    kind = node.name()
    if isinstance(node, torch.autograd.function.BackwardCFunction) or kind.startswith(LAYERS):
        return True
    if kind.startswith(VIEWS):
        behind = node.next_functions[0][0]
        return behind is not None and behind.name().startswith(LINEAR) and _is_layer(behind)
    if kind.startswith(PRODUCTS) and any(one is None for one, _ in node.next_functions[-2:]):
        return True
    return any(each.numel() > 1 for each in _weights(node))


def _of_weights(node: Any, shape: Sequence[int]) -> bool:
    """Whether a node may compute nothing but a function of weights, as a penalty does."""
    weights, behind = list(_weights(node)), node.next_functions
    alone = 0 < len(weights) == len(behind) and not node.name().startswith("Embedding")
    return alone or any(each.shape == torch.Size(shape) for each in weights)


def _weights(node: Any) -> Iterator[torch.Tensor]:
    """The parameters that a node takes."""
    for behind, _ in node.next_functions:
        while behind is not None and behind.name().startswith(WEIGHTS):
            behind = behind.next_functions[0][0]
        if isinstance(leaf := getattr(behind, "variable", None), torch.nn.Parameter):
            yield leaf


def _of_ranks(node: Any) -> bool:
    """Whether a node is that of a collective of torch, so that the loss is one over several ranks."""
    if not isinstance(node, torch.autograd.function.BackwardCFunction):
        return False
    return hooks_of_torch.function_of(node).__module__.startswith(COLLECTIVES)
