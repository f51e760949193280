"""What a loss of the Hugging Face Trainer is a mean over, see ``paceline.hosts.transformers``."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from typing import Any

import torch

from paceline.errors import PacelineError
from paceline.torch import hooks_of_torch, timing
from paceline.torch.hooks_of_torch import MEAN, SUM
from paceline.torch.mistakes.loss_ends import PASSED, REDUCES, behind_ddp, ends, nodes_of

LABELS, SAMPLES, TOTAL = OVER = "labels", "samples", "sum"
LOOKS = 4  # micro-batches whose loss has parts that disagree, and whose graph is looked at


class Counting:
    """What the losses of one Trainer are means over.

    over: the user's choice, one of ``OVER``; None to find it in the graph of each loss.
    """

    def __init__(self, over: Any) -> None:
        if over not in (None, *OVER):
            raise PacelineError(f"balance={{'over': {over!r}}}: expected 'labels', 'samples' or 'sum'")
        self._over = over
        self._looks = LOOKS  # graphs of losses whose parts disagree that are still to be looked at

    def of(self, trainer: Any) -> str | None:
        """What the losses are over: one of ``OVER``, or None if ``count`` finds it."""
        if self._over is None and _sums_sequences(trainer):
            return TOTAL
        return self._over

    def count(self, loss: torch.Tensor, labels: int, samples: int) -> float:
        """What this loss of a micro-batch with so many labels and samples is a mean over; 0 for one that only fills
        up a rank's micro-steps."""
        if self._over is not None or not samples:
            return labels
        found = numbers_of(loss, samples)
        over, agree = mean_over(found, labels, samples)
        if not agree and self._looks:
            self._looks -= 1
            if all(mean for _, mean in found) or _joined(loss, samples):
                self._looks = 0
                warnings.warn(
                    "the loss is a sum of means over different numbers, or of means and other parts, in this "
                    f"micro-batch of {samples} samples and {labels} labels, and counts as one over {over:g}, so that "
                    "the gradient depends on how the batch is divided; balance={'policy': 'equal'} divides it as "
                    "plain DDP does, and {'over': 'labels'} or {'over': 'samples'} says what the loss is over",
                    RuntimeWarning,
                    stacklevel=timing.level(),
                )
        return over


def mean_over(found: Sequence[tuple[float, bool]], labels: int, samples: int) -> tuple[float, bool]:
    """What a loss is a mean over, and whether its parts agree in that.

    found: those of ``numbers_of``.
    """
    known = [_known(number, mean, labels, samples) for number, mean in found]
    numbers = {number for number, _ in found}
    if not any(known):
        return labels, True
    if all(known) and len(numbers) == 1:
        return numbers.pop(), True
    sure = {
        number for number, mean in found if mean or number == samples or (labels and number % labels == 0)
    }
    if not (all(known) and sure == numbers):  # some parts may be penalties, which count alike for any number
        return sure.pop() if len(sure) == 1 else labels, False
    if labels in numbers and all(one == labels or (one % labels == 0 and one != samples) for one in numbers):
        return labels, True  # also one over labels and classes, as that of label smoothing
    return samples, all(one % samples == 0 for one in numbers)


def _known(number: float, mean: bool, labels: int, samples: int) -> bool:
    """Whether a part of a loss is a mean. A sum is one over what the program has divided it by; the Trainer itself
    divides by 1 if nothing is counted."""
    return math.isfinite(number) if mean else labels > 0 and (number == samples or 1 < number < math.inf)


def _joined(loss: torch.Tensor, samples: int) -> bool:
    """Whether parts of a loss are computed from the same activations; a penalty is computed from parameters alone."""
    seen = set[Any]()
    for end in ends(loss, samples)[0]:
        nodes = {node for node in nodes_of(end.node) if not hasattr(node, "variable")}
        if nodes & seen:
            return True
        seen |= nodes
    return False


def numbers_of(loss: torch.Tensor, samples: int) -> list[tuple[float, bool]]:
    """What each part of a loss is over (NaN if unknown), and whether it is a mean; otherwise it is a sum that is
    divided by that number."""
    if samples == 1 and _of_one(loss):
        return [(1.0, True)]
    found = list[tuple[float, bool]]()
    for end in ends(loss, samples)[0]:
        if end.node is None:  # a number
            continue
        kind = hooks_of_torch.reduction(end.node)
        if end.kind.startswith("NllLoss") and kind == MEAN:
            found.append((hooks_of_torch.nll_weights(end.node)[0], True))
        elif end.kind.startswith("MeanBackward") or kind == MEAN:
            found.append((hooks_of_torch.reduced(end.node) or math.nan, True))
        else:
            sums = end.kind.startswith("SumBackward") or kind == SUM
            found.append((end.divisor if sums else math.nan, False))
    return found


def _of_one(loss: torch.Tensor) -> bool:
    """Whether a loss is a mean of one sample's loss, which may be a mean itself: over another number."""
    node = behind_ddp(loss.grad_fn, loss.output_nr)
    while node is not None and node.name().startswith(PASSED):
        node = behind_ddp(*node.next_functions[0])
    reduces = node is not None and node.name().startswith(REDUCES)
    return reduces and hooks_of_torch.reduced(node) == 1 == hooks_of_torch.summed_rows(node)


def _sums_sequences(trainer: Any) -> bool:
    """Whether a model for CTC computes the loss and returns its sum."""
    from transformers import Trainer

    own = trainer.compute_loss_func is not None or type(trainer).compute_loss is not Trainer.compute_loss
    return not own and getattr(getattr(trainer.model, "config", None), "ctc_loss_reduction", None) == "sum"
