"""The ends of a loss: the nodes of its graph whose sums and multiples it is, such as means over the batch."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from paceline.torch import hooks_of_torch

# Nodes that sum or multiply single numbers, or give them another form.
PASSED = (
    *("Add", "Clone", "Div", "Mul", "Neg", "Sub", "ToCopy", "_DDPSink"),
    *("Cat", "Permute", "Reshape", "Squeeze", "Stack", "UnsafeView", "Unsqueeze", "View"),
)
SCALES = "Div", "Mul"
JOINS = "Cat", "Stack"
SHAPES = "Permute", "Reshape", "Squeeze", "UnsafeView", "Unsqueeze", "View"
REDUCES = "SumBackward", "MeanBackward"
DEEP = 20_000  # nodes of a graph that are looked at


class End(NamedTuple):
    """An end of a loss. Losses of the same form have the same ``place`` for it."""

    place: int
    node: Any
    kind: str  # the node's name, empty for none
    scale: float | None  # what multiplies it; None if nothing does, or 1
    divisor: float  # the innermost number that divides it; NaN if there is none
    alone: bool  # nothing is added to it


def ends(loss: torch.Tensor, samples: int, rows: bool = False) -> tuple[list[End], list[float]]:
    """The ends of a loss, which is one number, and all numbers by which it is multiplied or divided on the way. A sum
    of as many losses as ``samples`` is an end, since each may be that of a sample; none is multiplied by 0.

    rows: whether a sum or mean of one row is an end for one sample, as that of several rows is for several samples.
    """
    found, factors, alone = list[End](), list[float](), True
    nodes: list[tuple[Any, float | None, float]] = [
        (behind_ddp(loss.grad_fn, loss.output_nr), None, math.nan)
    ]
    for place, (node, scale, divisor) in enumerate(nodes):
        kind = "" if node is None else node.name()
        over = _losses(node, kind)
        row = rows and samples == over == 1 == hooks_of_torch.summed_rows(node)
        if row or (over == samples > 1 and kind.startswith("Sum")):
            over = 0
        single = kind.startswith(JOINS) and len(node.next_functions) == 1  # perhaps of the only sample
        if single or not (kind.startswith(PASSED) or over):
            if scale != 0:
                found.append(End(place, node, kind, None if scale == 1 else scale, divisor, alone))
            continue
        if kind.startswith(SCALES):
            own = list(_factors(node))
            factors += own
            divides = kind.startswith("Div")
            by = own[0] if len(own) == 1 and (own[0] or not divides) else math.nan
            scale = (1.0 if scale is None else scale) * (1.0 / by if divides else by)
            divisor = by if divides else divisor
        elif over > 1 and kind.startswith("Mean"):
            scale = (1.0 if scale is None else scale) / over
        alone = alone and not (kind.startswith(("Add", "Sub")) or over > 1)
        # Each node once: a sum may contain the same node many times.
        known = [one for one, *_ in nodes]
        behind = [behind_ddp(one, output) for one, output in node.next_functions]
        nodes += [(one, scale, divisor) for one in behind if one not in known]
    return found, factors


def behind_ddp(node: Any, output: int) -> Any:
    """The node that made this output of a node: DDP's own node has all outputs of a module, such as its loss beside
    what that was computed from."""
    while node is not None and node.name().startswith("_DDPSink") and output < len(node.next_functions):
        node, output = node.next_functions[output]
    return node


def nodes_of(first: Any) -> Iterator[Any]:
    """The nodes of a graph, each once."""
    left, known = [first], {first}
    while left and len(known) < DEEP:
        node = left.pop()
        if node is None:
            continue
        yield node
        for behind, _ in node.next_functions:
            if behind is not None and behind not in known:
                known.add(behind)
                left.append(behind)


def _losses(node: Any, kind: str) -> int:
    """How many losses a node of a sum or mean is over, each of them one number; 0 if it is over elements."""
    if not kind.startswith(REDUCES):
        return 0
    many = hooks_of_torch.reduced(node)
    if many == 1:
        return 1
    return many if joins(node) == many else 0


def joins(node: Any) -> int:
    """How many tensors were joined to the one that a node reduces; 0 if it was not joined."""
    behind = node.next_functions[0][0]
    while behind is not None and behind.name().startswith(SHAPES):
        behind = behind.next_functions[0][0]
    joined = behind is not None and behind.name().startswith(JOINS)
    return len(behind.next_functions) if joined else 0


def _factors(node: Any) -> Iterator[float]:
    """The single numbers that a node multiplies or divides by."""
    for factor in hooks_of_torch.saved_factors(node):
        if factor.numel() == 1 and not factor.requires_grad:
            with hooks_of_torch.without_modes():
                yield float(factor)
