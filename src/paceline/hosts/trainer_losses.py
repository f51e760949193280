"""What a loss of the Hugging Face Trainer is a mean over, see ``paceline.hosts.transformers``."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from paceline.errors import PacelineError
from paceline.torch import hooks_of_torch, timing
from paceline.torch.hooks_of_torch import MEAN, SUM
from paceline.torch.mistakes.loss_ends import End, ends, joins, nodes_of

LABELS, SAMPLES, TOTAL = OVER = "labels", "samples", "sum"
LOOKS = 4  # micro-batches whose loss has parts that disagree, and whose graph is looked at
ALIKE = 3  # different numbers of samples with the same divisor, which is then a constant
ELEMENTWISE = frozenset({"Add", "Div", "Maximum", "Minimum", "Mul", "Sub"})
# Nodes of a penalty: they take no samples, unless a tensor without a gradient enters one and gives it another shape.
OF_PARAMETERS = ELEMENTWISE.union(
    ("Abs", "Alias", "Cat", "Clamp", "ClampMin", "Clone", "Dot", "Exp", "Expand", "LinalgVectorNorm", "Log"),
    ("Mean", "Mm", "Neg", "Norm", "Permute", "Pow", "Relu", "Reshape", "ReshapeAlias", "Sigmoid", "Softplus"),
    ("Sqrt", "Squeeze", "Stack", "Sum", "T", "Tanh", "ToCopy", "Transpose", "UnsafeView", "Unsqueeze"),
    ("View",),
)
FORMS = 64  # forms of losses that are remembered


class Micro(NamedTuple):
    """What is known of a micro-batch."""

    labels: int
    samples: int
    items: bool = False  # whether the Trainer has passed the number of labels to what computes the loss


class Part(NamedTuple):
    """A part of a loss: a mean over a number, or a sum that is divided by it."""

    number: float  # NaN if it is unknown, or nothing divides the sum
    mean: bool
    times: float = math.nan  # what a sum that nothing divides is multiplied by; NaN for another part

    def known(self, micro: Micro) -> bool:
        """Whether this part is a mean. A sum is one over what the program divides it by."""
        if self.mean or self.number != 1:
            return math.isfinite(self.number)
        # Otherwise the training step has divided a sum by its single micro-step.
        return 1 in (micro.labels, micro.samples)

    def sure(self, micro: Micro) -> bool:
        """Whether this part is a mean over samples or labels, and not perhaps a penalty that is divided."""
        of_labels = micro.labels and self.number % micro.labels == 0
        return self.known(micro) and (self.mean or self.number == micro.samples or bool(of_labels))

    def sums(self, micro: Micro) -> bool:
        """Whether this part is a sum that no number of the batch divides."""
        return not (self.mean or self.known(micro) or (math.isnan(self.times) and self.number != 1))


class Counting:
    """What the losses of one Trainer are means over.

    over: the user's choice, one of ``OVER``; None to find it in the graph of each loss.
    """

    def __init__(self, over: Any) -> None:
        if over not in (None, *OVER):
            raise PacelineError(f"balance={{'over': {over!r}}}: expected 'labels', 'samples' or 'sum'")
        self._over = over
        self._looks = LOOKS  # graphs of losses whose parts disagree that are still to be looked at
        self._said_sum = False
        # The newest divisor of a sum, and the numbers of samples for which it was the same without a break.
        self._divisor, self._alike = math.nan, set[int]()
        self._joined = set[int]()  # numbers of samples of which each had a loss in the same sum
        # By the form of a loss: which ends are penalties, and the first ratios of what its parts are means over.
        self._penalties: dict[tuple[Any, ...], set[int]] = {}
        self._ratios: dict[tuple[Any, ...], list[float]] = {}

    def of(self, trainer: Any) -> str | None:
        """What the losses are over: one of ``OVER``, or None if ``count`` finds it."""
        if self._over is None and _sums_sequences(trainer):
            return TOTAL
        return self._over

    def count(self, loss: torch.Tensor, labels: int, samples: int, items: bool = False) -> float:
        """What the loss of a micro-batch is a mean over.

        Args:
            loss: Of this micro-batch.
            labels: Number of its labels.
            samples: Number of its samples; 0 for one that only fills up a rank's micro-steps.
            items: Whether the Trainer has passed the number of labels to what computes the loss.

        Returns:
            A number with which the loss is multiplied.
        """
        if self._over is not None or not samples:
            return labels
        micro = Micro(labels, samples, items)
        parts = [end for end in ends(loss, samples, rows=True)[0] if end.node is not None]
        form = tuple((end.place, end.kind) for end in parts)
        parts = self._without_penalties(form, parts)
        found = [part_of(end) for end in parts]
        if not found:  # a number
            return labels
        if _of_none(found, micro):
            return 0
        if len(found) == 1 or all(part.sums(micro) for part in found):
            return self._of_alike(found, parts, micro)
        over, agree = mean_over(found, micro)
        sure = all(part.sure(micro) for part in found)
        agree = agree and (not sure or self._same_ratios(form, found))
        if not agree and self._looks:
            self._looks -= 1
            if sure or _joined(parts):
                self._looks = 0
                _warn(
                    "the loss is a sum of means over different numbers, or of means and other parts, in this "
                    f"micro-batch of {samples} samples and {labels} labels, and counts as one over {over:g}, so that "
                    "the gradient depends on how the batch is divided; balance={'policy': 'equal'} divides it as "
                    "plain DDP does, and {'over': 'labels'} or {'over': 'samples'} says what the loss is over"
                )
        return over

    def _without_penalties(self, form: tuple[Any, ...], parts: list[End]) -> list[End]:
        """Those parts of a loss that are computed from samples."""
        if len(parts) < 2:
            return parts
        if (penalties := self._penalties.get(form)) is None:
            penalties = {end.place for end in parts if _of_parameters(end.node)}
            if len(self._penalties) == FORMS:
                self._penalties.clear()
                self._ratios.clear()
            self._penalties[form] = penalties
        return [end for end in parts if end.place not in penalties] or parts

    def _of_alike(self, found: Sequence[Part], parts: Sequence[End], micro: Micro) -> float:
        """What a loss of one part is a mean over, or of several that are sums."""
        part = found[0]
        if not part.known(micro):
            if len(found) == 1 and not part.sums(micro):
                self._note_joined(parts[0], micro.samples)
                return micro.labels
            times = 1.0 if len(found) > 1 or math.isnan(part.times) else part.times
            if times == 1.0:
                self._say_sum()
            else:
                self._note_divisor(1.0 / times, micro.samples)
            return 1.0 / times
        if part.mean:
            return part.number * (abs(parts[0].divisor) if math.isfinite(parts[0].divisor) else 1.0)
        if part.number not in (micro.labels, micro.samples):
            self._note_divisor(part.number, micro.samples)
        return part.number

    def _note_joined(self, end: End, samples: int) -> None:
        """Warn if sums are over as many joined losses as samples, for different numbers of samples."""
        if end.kind.startswith("SumBackward") and joins(end.node) == samples:
            self._joined.add(samples)
            if len(self._joined) > 1:
                self._say_sum()

    def _note_divisor(self, divisor: float, samples: int) -> None:
        """Warn if sums are divided by the same number for different numbers of samples."""
        if not math.isclose(divisor, self._divisor, rel_tol=1e-6):
            self._divisor, self._alike = divisor, set()
        self._alike.add(samples)
        if len(self._alike) == ALIKE:
            self._say_sum()

    def _say_sum(self) -> None:
        if not self._said_sum:
            self._said_sum = True
            _warn(
                "the loss is a sum, and counts once for each micro-batch, so that the gradient depends on how many "
                "the ranks take; balance={'over': 'sum'} trains with a sum as plain DDP does"
            )

    def _same_ratios(self, form: tuple[Any, ...], found: Sequence[Part]) -> bool:
        """Whether the numbers that the parts of a loss are over had the same ratios in each micro-batch."""
        ratios = [part.number / found[0].number for part in found]
        first = self._ratios.setdefault(form, ratios)
        return all(map(math.isclose, ratios, first))


def mean_over(found: Sequence[Part], micro: Micro) -> tuple[float, bool]:
    """What a loss of these parts is a mean over, and whether they agree in that."""
    numbers, labels, samples = {part.number for part in found}, micro.labels, micro.samples
    if _of_none(found, micro):
        return 0, True
    known = [part.known(micro) for part in found]
    if not any(known):
        return labels, True
    if all(known) and len(numbers) == 1:
        return numbers.pop(), True
    sure = {part.number for part in found if part.sure(micro)}
    if sure != numbers:  # some parts may be penalties, which count alike for any number
        return sure.pop() if len(sure) == 1 else labels, False
    # Also one over labels and classes, as that of label smoothing.
    over = samples if samples in numbers else labels if labels in numbers else min(numbers)
    return over, any(all(one % by == 0 for one in numbers) for by in (over, samples))


def _of_none(found: Sequence[Part], micro: Micro) -> bool:
    """Whether a loss is a mean over no labels. Without labels the Trainer passes 1 for their number."""
    passed = micro.items and not micro.labels
    return any(part.number == 0 or (passed and not part.mean and part.number == 1) for part in found)


def _joined(parts: Sequence[End]) -> bool:
    """Whether parts of a loss are computed from the same activations."""
    seen = set[Any]()
    for end in parts:
        nodes = {node for node in nodes_of(end.node) if not hasattr(node, "variable")}
        if nodes & seen:
            return True
        seen |= nodes
    return False


def _of_parameters(first: Any) -> bool:
    """Whether a part of a loss is computed from parameters alone, as a penalty is."""
    for node in nodes_of(first):
        if hasattr(node, "variable"):
            continue
        kind = node.name().partition("Backward")[0]
        if kind not in OF_PARAMETERS:
            return False
        given = [(one, output) for one, output in node.next_functions if one is not None]
        if len(given) < len(node.next_functions):  # a number, or a tensor that has no gradient
            shapes = [_shape(one, output) for one, output in given]
            if kind not in ELEMENTWISE or hooks_of_torch.output_shapes(node)[:1] != shapes:
                return False
    return True


def _shape(node: Any, output: int) -> Any:
    """The shape of a node's output, or of the parameter that a node is of."""
    leaf = getattr(node, "variable", None)
    return hooks_of_torch.output_shapes(node)[output] if leaf is None else leaf.shape


def part_of(end: End) -> Part:
    """What a part of a loss is over, as its graph shows."""
    kind = hooks_of_torch.reduction(end.node)
    if end.kind.startswith("NllLoss") and kind == MEAN:
        return Part(hooks_of_torch.nll_weights(end.node)[0], True)
    if end.kind.startswith("MeanBackward") or kind == MEAN:
        return Part(hooks_of_torch.reduced(end.node) or math.nan, True)
    if not (end.kind.startswith("SumBackward") or kind == SUM):
        return Part(math.nan, False)
    if not math.isnan(end.divisor):
        return Part(abs(end.divisor), False)
    times = 1.0 if end.scale is None else abs(end.scale)
    # A sum of joined losses may be that of each sample's, or of several heads.
    return Part(math.nan, False, math.nan if joins(end.node) or not math.isfinite(1.0 / times) else times)


def _warn(says: str) -> None:
    warnings.warn(says, RuntimeWarning, stacklevel=timing.level())


def _sums_sequences(trainer: Any) -> bool:
    """Whether a model for CTC computes the loss and returns its sum."""
    from transformers import Trainer

    own = trainer.compute_loss_func is not None or type(trainer).compute_loss is not Trainer.compute_loss
    return not own and getattr(getattr(trainer.model, "config", None), "ctc_loss_reduction", None) == "sum"
