"""Finds losses that are means over something else than the samples, such as the targets that a mask leaves.

It compares what a loss is a mean over in several micro-steps. A number that rises although the samples do not, and
falls although they do not, depends on the data: it is no number of tokens, pixels or pairs, which grow with the
samples, and none that a schedule changes.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from paceline.torch import hooks_of_torch
from paceline.torch.hooks_of_torch import MEAN, SUM
from paceline.torch.mistakes.derivatives import DISTANCES
from paceline.torch.mistakes.loss_ends import End, nodes_of
from paceline.torch.plan import Piece

NEAR = 100  # nodes in which a pick is looked for
VALUES = 3  # different numbers that are no multiple of the samples
PICKS = "IndexBackward", "IndexSelect"
WEIGHTS = "TBackward", "Transpose", "torch::"  # nodes whose outputs may be a layer's weights


class Averages:
    """What the ends of one loop's losses were means over."""

    def __init__(self) -> None:
        # By an end's place, in the order of the micro-steps: the samples of each, and what the end was a mean over.
        self._over: defaultdict[int, list[tuple[int, float]]] = defaultdict(list)
        self._ends: set[int] = set()  # numbers of ends that a loss had
        # By an end's place: for each number of samples, the rows that an end picked some of, for each sample.
        self._rows: defaultdict[int, dict[int, float]] = defaultdict(dict)

    def wavering(self, ends: Sequence[End], piece: Piece) -> float | None:
        """The number that one of these ends is a mean over, if it is none that the samples determine."""
        self._ends.add(len(ends))
        own = piece.samples
        if len(ends) >= own:
            return None
        # A sum of each sample's own loss has fewer ends if some samples have none; a part of the loss that only some
        # batches have, such as that of their boxes, is one of the batch.
        alike = len(self._ends) == 1
        for end in ends:
            over = _over(end, own)
            # Not those of all ranks' samples, or of the other ranks'.
            if math.isfinite(over) and over % piece.batch and over % (piece.batch - own):
                found = self._over[end.place]
                found.append((own, over))
                of_batch = self._of_batch(end, own) or alike
                if of_batch and _wavers(found) and not _compares(end.node, own):
                    return over
        return None

    def _of_batch(self, end: End, samples: int) -> bool:
        """Whether an end picks some of the batch's rows: for other numbers of samples, of as many rows for each."""
        seen = self._rows[end.place]
        if rows := _picks_of(end.node):
            seen[samples] = rows / samples
        return len(seen) > 1 and len(set(seen.values())) == 1


def _over(end: End, samples: int) -> float:
    """What an end is a mean over: its elements, or what its sum is divided by. NaN for another end."""
    node, kind = end.node, end.kind
    if kind.startswith("NllLoss") and hooks_of_torch.reduction(node) == MEAN:
        return float(hooks_of_torch.nll_weights(node)[1])
    if kind.startswith("MeanBackward") or hooks_of_torch.reduction(node) == MEAN:
        return float(hooks_of_torch.reduced(node) or math.nan)
    if kind.startswith(("SumBackward", "NansumBackward", *hooks_of_torch.PRODUCTS)):
        rows = hooks_of_torch.summed_rows(node)
        return end.divisor if rows % samples == 0 or rows == end.divisor else math.nan
    return end.divisor if hooks_of_torch.reduction(node) == SUM else math.nan


def _picks_of(first: Any) -> int:
    """The rows of what a part of a loss picks from; 0 if it picks none."""
    left = [first]
    for node in left:
        behind, output = (node.next_functions or [(None, 0)])[0]
        if node.name().startswith((*PICKS, "MaskedSelect")) and behind is not None:
            shape = hooks_of_torch.output_shapes(behind)[output]
            return int(shape[0]) if shape else 0
        left += [one for one, _ in node.next_functions if one is not None and one not in left]
        if len(left) > NEAR:
            break
    return 0


def _wavers(found: Sequence[tuple[int, float]]) -> bool:
    """Whether what a loss is a mean over rose and fell against its samples, and often was no multiple of them."""
    pairs = [(early, late) for place, late in enumerate(found) for early in found[:place]]
    fell = any(late[0] >= early[0] and late[1] < early[1] for early, late in pairs)
    rose = any(late[0] <= early[0] and late[1] > early[1] for early, late in pairs)
    return fell and rose and len({over for samples, over in found if over % samples}) >= VALUES


def _compares(first: Any, samples: int) -> bool:
    """Whether a part of a loss may compare samples with each other: then no number makes it a mean over samples."""
    picked = set[Any]()
    for node in nodes_of(first):
        kind = node.name()
        if kind.startswith(DISTANCES):
            return True
        if kind.startswith(PICKS):
            # Indices of pairs pick from the same rows twice.
            rows = node.next_functions[0][0]
            if rows in picked and not rows.name().startswith("torch::"):
                return True
            picked.add(rows)
        elif not kind.startswith(WEIGHTS):
            for shape in hooks_of_torch.output_shapes(node):
                if (
                    len(shape) > 1
                    and shape[0] in (samples, 2 * samples)
                    and shape[1] in (shape[0], shape[0] - 1)
                ):
                    return True
    return False
