"""Warns of losses that train another model where loads differ. It looks at a rank's first micro-steps of each epoch,
and costs nothing afterwards. What it finds it reports once, and it changes nothing.

- A mean over class weights, or over the elements that a mask or ``ignore_index`` leaves, counts as one over samples.
- A sum counts as a mean, or a mean that is multiplied by this rank's number of samples.
- A loss that a total of all ranks has normalised, or that contains a statistic which was summed over the ranks, gets
  another weight.
- A statistic that was summed over the ranks is divided by this rank's own number of samples.
- A hook of the program limits the gradient of a parameter, which has the weight of this rank's loss.
- A custom autograd function adds its own gradient, which no weight of the loss reaches.
- A loss compares samples with each other, so that no weight makes it that of the whole batch.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from paceline.torch import hooks_of_torch, timing
from paceline.torch.gradients.reducers import LOOKS
from paceline.torch.hooks_of_torch import MEAN, SUM
from paceline.torch.mistakes import Words
from paceline.torch.mistakes.averages import Averages
from paceline.torch.mistakes.collectives import GATHERS, Listening, at, tensors_of
from paceline.torch.mistakes.comparing import Comparisons
from paceline.torch.mistakes.gradient_limits import GradientLimits
from paceline.torch.mistakes.loss_ends import REDUCES, End, ends, joins, nodes_of
from paceline.torch.mistakes.program_text import divides_by_own
from paceline.torch.plan import Piece

CALLS = 64  # collectives of an epoch that are looked at
LATER = 2  # losses of each later epoch that are looked at
GRAPHS = 4  # graphs without a collective that are looked at, in a run
COMPARES = "compares"  # the name of a loss that compares samples
ELEMENTWISE = 16  # nodes before a sum that are looked at
TWICE = 2  # micro-steps in which a number is found, as one may be equal by chance


class Summed:
    """A sum over the ranks that the program has called for within a micro-step, at ``where``, a file and line."""

    def __init__(self, where: tuple[str, int], results: list[torch.Tensor], in_place: bool) -> None:
        self.where, self.results = where, results
        # The graph continues from this node with another value, and the gradient with that of this rank's part alone.
        grown = results[0].grad_fn if in_place and len(results) == 1 else None
        self.node: Any = grown

    def total(self) -> float | None:
        """The sum, if it is a single number."""
        if any(one.numel() != 1 or one.dtype == torch.bool or one.is_complex() for one in self.results):
            return None
        return math.fsum(float(one.detach()) for one in self.results)


class LossWatch(Listening):
    """The checks of one loop's losses.

    running: gives the piece of the running micro-step, None between rounds. ranks: of the run. by_hook: gradients are
    weighted instead of the loss. parameters: those that are trained. words: what the messages name. comparisons: find
    losses that compare samples; None if they cannot be looked for.
    """

    def __init__(
        self,
        running: Callable[[], Piece | None],
        ranks: int,
        by_hook: bool,
        parameters: Sequence[torch.nn.Parameter] = (),
        words: Callable[[], Words] = Words,
        comparisons: Comparisons | None = None,
    ) -> None:
        self._parameters, self._words = parameters, words
        self._limits: GradientLimits | None = None
        self._left = 0  # losses still to be looked at
        self._running, self._ranks, self._by_hook = running, ranks, by_hook
        # By the place of a loss's end, the numbers that divided it.
        self._divisors: dict[int, set[float]] = {}
        self._graphs = GRAPHS  # graphs without a collective that are still to be looked at
        self._calls_left = 0
        self._first = True  # the next epoch is the first
        self._piece: Piece | None = None  # of the micro-step in which the calls were made
        self._said: set[str] = set()
        self._calls: list[Summed] = []  # of the running micro-step
        self._sums = list[int]()  # samples of the micro-steps whose loss was a sum
        self._totals = 0  # micro-steps whose loss was divided by a total
        # Of each sum or mean in the loss, by its place there: what multiplies the sum, and the numbers of samples.
        self._scales: dict[int, tuple[float, set[int]]] = {}
        self._averages, self._comparisons = Averages(), comparisons
        self._gathers: Piece | None = None  # of the micro-step in which the program has gathered rows
        self._injected: dict[Any, tuple[float, float]] = {}  # by function: what it was given, and has added
        self._read: set[tuple[str, int]] = set()  # places whose source was read

    def iteration(self, step: int) -> None:
        self._left, self._calls_left = LOOKS if self._first else LATER, CALLS
        self._first = False
        if self._ranks > 1:
            super().iteration(step)
        if self._limits is None and self._ranks > 1 and not self._by_hook:
            self._limits = GradientLimits(self._parameters, self._differs, self._limited)

    def weighs(
        self, loss: torch.Tensor | None, piece: Piece, reduction: str, count: float | None, first: bool
    ) -> bool:
        self._left -= 1
        # Without a look at the micro-step's collectives, it may have gathered the samples of all ranks.
        if loss is not None and reduction != "global" and self._left >= 0:
            self._compares(loss, piece)
        if count is None:
            self._look(loss, piece, reduction)
        if not self._left:
            self._end()
        return self._left > 0

    def known(self, what: str) -> None:
        self._said.add(what)

    def close(self) -> None:
        self._end()
        if self._limits is not None:
            self._limits.close()

    def _end(self) -> None:
        """Look at no more losses."""
        self._left = 0
        super().close()
        self._calls.clear()

    def _look(self, loss: torch.Tensor | None, piece: Piece, reduction: str) -> None:
        """Look at a piece's loss, which counts as the mean or the sum over its samples; None for an unknown one."""
        calls, self._calls = self._calls if self._piece is piece else [], []
        part = 0 < piece.samples < piece.batch and reduction != "global"
        if part and loss is not None and loss.grad_fn is not None:
            if self._ranks > 1 and piece.plan.uneven:
                self._graph(loss, piece, calls)
            self._chain(loss, piece, reduction, calls)

    def _compares(self, loss: torch.Tensor, piece: Piece) -> None:
        """Whether a loss compares this rank's samples; one that has gathered those of all ranks may."""
        known = piece is self._gathers or COMPARES in self._said
        if self._ranks == 1 or known or not piece.plan.uneven:
            return
        calls = self._calls if self._piece is piece else []
        if self._comparisons is not None and self._comparisons.found(
            loss, piece, {one.node for one in calls}
        ):
            self._say(
                COMPARES,
                f"round {piece.step}: the loss compares the samples of a micro-batch with each other, chooses among "
                "them, or is a function of a statistic of them, so that it depends on how the batch is divided; "
                "compute it from the samples of all ranks, see docs/porting.md (Losses that compare samples), or "
                "divide batches as plain DDP does: policy='equal'",
            )

    # -- the last operations of a loss ------------------------------------------------------------------------

    def _chain(self, loss: torch.Tensor, piece: Piece, reduction: str, calls: list[Summed]) -> None:
        """Look at the sums and multiples that a loss is made of."""
        totals = {one: found for one in calls if (found := one.total()) is not None and found}
        parts, factors = ends(loss, piece.samples)
        alone = "statistic" not in self._said
        for factor in factors if totals else ():
            self._normalised(factor, totals, piece)
        if reduction != "mean":
            return
        if not totals and (over := self._averages.wavering(parts, piece)) is not None:
            self._say(
                "mean",
                f"round {piece.step}: the loss is a mean over {over:g}, which depends on the data, and counts as one "
                f"over {piece.samples} samples, so that the gradient is not that of the whole batch; "
                + self._words().count.format("mask.sum()", "weight[y].sum()"),
            )
        for end in parts:
            divisors = self._divisors.setdefault(end.place, set())
            if not math.isnan(end.divisor):
                divisors.add(end.divisor)
            # A divisor of 1 may be the number of samples or of positives, which is another one in other batches.
            undivided = end.scale is None and (not divisors or (piece.samples > 1 and divisors == {1.0}))
            if end.scale is not None and "mean" not in self._said:
                self._grows(end, end.scale, piece)
            if end.kind.startswith("NllLoss") and hooks_of_torch.reduction(end.node) == MEAN:
                self._weighted(end, parts, piece)
            elif undivided and _sums(end, alone and end.alone, piece.samples):
                self._sums.append(piece.samples)
                # Losses in one tensor may be as many as the samples by chance, but not for two numbers of samples.
                if len(set(self._sums) if joins(end.node) else self._sums) == TWICE:
                    self._say(
                        "sum",
                        f"round {piece.step}: the loss is a sum, and counts as a mean over {piece.samples} samples, "
                        "so that the gradient is not that of the whole batch where loads differ; pass "
                        f"{self._form('sum')} and leave out the loop's own division, or {self._form('global')} if it "
                        "is already one over all ranks",
                    )
                return

    def _weighted(self, end: End, parts: list[End], piece: Piece) -> None:
        """Whether a negative log-likelihood is a mean over other weights than one for each target."""
        own, likes = piece.samples, sum(one.kind.startswith("NllLoss") for one in parts)
        over, targets = hooks_of_torch.nll_weights(end.node)
        # A loss for each sample may be a mean over anything: their mean is one over samples.
        if abs(over - targets) > 1e-6 * targets and (own == 1 or likes % own):
            self._say(
                "mean",
                f"round {piece.step}: the loss is a mean over {over:g}, the weights of its {targets} targets "
                f"or those that ignore_index leaves, and counts as one over {own} samples, so that "
                "the gradient is not that of the whole batch; "
                + self._words().count.format("weight[y].sum()", "(y != ignore_index).sum()"),
            )

    def _grows(self, end: End, scale: float, piece: Piece) -> None:
        """Whether a loss grows with its samples: a sum times the same number for other numbers of samples, or a mean
        times its own multiple."""
        own = piece.samples
        if _sums(end, True, own):
            times = scale
        elif end.kind.startswith("Mean") or hooks_of_torch.reduction(end.node) == MEAN:
            times = scale / own
        else:
            return
        before, samples = self._scales.get(end.place, (math.nan, set()))
        if not abs(times - before) <= 1e-6 * abs(times):
            self._scales[end.place] = times, {own}
            return
        samples.add(own)
        if len(samples) > TWICE:
            self._say(
                "grows",
                f"round {piece.step}: the loss grows with this rank's samples, and counts as a mean over {own} "
                "samples, so that the gradient is not that of the whole batch where loads differ; pass the sum with "
                f"{self._form('sum')}, or {self._form('global')} if it is already one over all ranks",
            )

    def _normalised(self, factor: float, totals: dict[Summed, float], piece: Piece) -> None:
        """Whether the loss is divided by a total of all ranks."""
        if not piece.plan.uneven:
            return
        for one, total in totals.items():
            for size in (total, total / self._ranks, max(total / self._ranks, 1.0)):
                usual = size in (1.0, float(self._ranks), float(piece.samples))
                if not usual and min(abs(factor - size), abs(factor * size - 1.0)) <= 1e-6 * abs(factor):
                    self._totals += 1
                    if self._totals == TWICE:
                        self._say(
                            "total",
                            f"round {piece.step}: {at(one.where)} sums a number over the ranks, and the loss is "
                            "divided by it: it is already normalised, and must not get this rank's weight; pass "
                            + self._form("global"),
                        )
                    return

    # -- the graph of a loss ----------------------------------------------------------------------------------

    def _graph(self, loss: torch.Tensor, piece: Piece, calls: list[Summed]) -> None:
        """Look for custom autograd functions, and for results of collectives, in the graph of a loss."""
        within = {id(one.node): one for one in calls if one.node is not None}
        within.pop(id(loss.grad_fn), None)  # for a log, after the loss
        if not (within or self._graphs):
            return
        self._graphs -= not within
        for node in nodes_of(loss.grad_fn):
            if (one := within.get(id(node))) is not None:
                self._say(
                    "statistic",
                    f"round {piece.step}: {at(one.where)} sums a tensor of the loss over the ranks: it is a "
                    f"loss over all ranks, and must not get this rank's weight; pass {self._form('global')}",
                )
            if isinstance(node, torch.autograd.function.BackwardCFunction):
                self._watch(node)

    def _watch(self, node: Any) -> None:
        """Note what a custom function gives to an input that is one number, as an auxiliary loss is, while it passes
        on the gradient of many: the same number for other gradients is none of the loss."""
        made = hooks_of_torch.function_of(node)
        known = self._by_hook or "injected" in self._said
        if known or made.__module__.partition(".")[0] == "torch":
            return
        sizes = [_size(behind, index) for behind, index in node.next_functions]
        if 1 not in sizes or max(sizes) <= 1:
            return
        place = sizes.index(1)

        def noted(gives: Any, given: Any) -> None:
            added = gives[place] if place < len(gives) else None
            if added is None or not given or given[0] is None:
                return
            now = float(given[0].detach().double().norm()), float(added.detach().double().sum())
            before = self._injected.get(made)
            self._injected[made] = now
            by_itself = not now[0] or (before is not None and before[1] == now[1] and before[0] != now[0])
            if now[1] and by_itself:
                self._say(
                    "injected",
                    f"{made.__module__}.{made.__qualname__} adds a gradient that does not come from the loss, so "
                    f"that the weight of the loss does not reach it, and it counts alike for every load; "
                    f"{self._words().added}",
                )

        node.register_hook(noted)

    # -- hooks on parameters ----------------------------------------------------------------------------------

    def _differs(self) -> bool:
        """Whether the running micro-step is one of a round whose loads differ."""
        return (piece := self._running()) is not None and piece.samples > 0 and piece.plan.uneven

    def _limited(self, parameter: torch.Tensor) -> None:
        shape = " x ".join(map(str, parameter.shape))
        self._say(
            "limited",
            f"a hook on a parameter ({shape}) limits its gradient, which is that of this rank with the weight of its "
            "samples, so that the gradient is not that of the whole batch; limit it between the backward pass and "
            "the optimizer's step, by torch.nn.utils.clip_grad_value_ or clip_grad_norm_",
        )

    # -- collectives ------------------------------------------------------------------------------------------

    def called(self, name: str) -> None:
        piece = self._running()
        if piece is None or name not in ("allreduce", *GATHERS):
            return
        if piece is not self._piece:
            self._piece = piece
            self._calls.clear()
        self._calls_left -= 1
        if self._calls_left < 0:
            self._end()
            return
        arguments = timing.arguments()
        tensors = tensors_of(arguments[1] if len(arguments) > 1 else None)
        gathers = name in GATHERS
        if not tensors:
            return
        if gathers and max(one.numel() for one in tensors) > self._ranks:
            self._gathers = piece if timing.caller(itself=True) is not None else self._gathers
            return
        if not gathers and not _is_sum(arguments[2] if len(arguments) > 2 else None):
            return
        if (found := timing.caller(itself=True)) is None:
            return
        frame, where = found
        self._calls.append(Summed(where, tensors, not gathers))
        if not gathers and where not in self._read and piece.plan.uneven:
            self._read.add(where)
            if divides_by_own(frame, where[1], piece):
                self._say(
                    "own",
                    f"round {piece.step}: {at(where)} sums over the ranks, and the result is divided by this rank's "
                    "own number of samples times the ranks, which is not the batch where loads differ; divide by the "
                    "sum of the ranks' numbers of samples",
                )

    def _form(self, reduction: str) -> str:
        return self._words().reduction.format(reduction)

    def _say(self, what: str, words: str) -> None:
        if what not in self._said:
            self._said.add(what)
            warnings.warn(words, RuntimeWarning, stacklevel=timing.level())


def _sums(end: End, alone: bool, samples: int) -> bool:
    """Whether an end sums over samples. alone: nothing is added to it; else it may be a penalty."""
    if end.kind.startswith("SumBackward"):
        rows = alone and samples > 1 and hooks_of_torch.summed_rows(end.node) == samples
        return rows and not _of_outputs(end.node, samples)
    return hooks_of_torch.reduction(end.node) == SUM


def _of_outputs(total: Any, samples: int) -> bool:
    """Whether a sum is over as many outputs as there are samples, each of them a mean or sum over these before."""
    nodes = [total]
    for node in nodes:
        for behind, index in node.next_functions:
            if behind is None or len(nodes) > ELEMENTWISE:
                continue
            given = hooks_of_torch.output_shapes(behind)[index : index + 1]
            if node is total or given == hooks_of_torch.output_shapes(node):
                nodes.append(behind)
                continue
            rows = node.name().startswith(REDUCES) and given and len(given[0]) > 1 and given[0][0] == samples
            if rows and 0 in hooks_of_torch.dims(node, len(given[0])):
                return True
    return False


def _size(node: Any, index: int) -> int:
    """Elements of an input of a custom function, which is output ``index`` of a node; 0 if it needs no gradient."""
    if node is None:
        return 0
    if (leaf := getattr(node, "variable", None)) is not None:
        return 0 if leaf.numel() == 1 else int(leaf.numel())  # a parameter is no auxiliary loss
    shapes = hooks_of_torch.output_shapes(node)
    return math.prod(shapes[index]) if index < len(shapes) else 0


def _is_sum(options: Any) -> bool:
    """Whether a reduction is a sum or a mean; ``options`` of a process group's method, or the operation."""
    kind = getattr(options, "reduceOp", options)
    return kind is None or kind == dist.ReduceOp.SUM or kind == dist.ReduceOp.AVG
