"""The backward passes of a loop's micro-steps: the weight of each gradient, and when a round's last one is ready."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from paceline.errors import PacelineError, WorkerError, short
from paceline.torch import peers, timing
from paceline.torch.batches import PLAIN, all_shapes
from paceline.torch.gradients.counts import checked_count
from paceline.torch.gradients.reducers import Reducer, weigh_in_hook
from paceline.torch.gradients.weighing import (
    GLOBAL,
    KINDS,
    MEAN,
    ExactWeighing,
    HookWeighing,
    Weighing,
)
from paceline.torch.hooks_of_torch import GradientsOfPass, at_end_of_pass, call_in_pass, running_pass
from paceline.torch.meter import Meter
from paceline.torch.mistakes.checks import Checks
from paceline.torch.plan import Piece
from paceline.torch.round import COMMIT, DRAWN, STEP, RoundState
from paceline.torch.terms import Terms

LOST = RuntimeError, WorkerError  # types of errors that may only mean that another rank is lost


class Passes:
    """Carries out what the events of micro-steps ask for. Call ``begin`` for each, ``weight`` before its backward
    pass and ``ended`` after it; under the hook DDP replaces the latter two calls.

    gradients: weighs them. round: gets all events. checks: those of the program. meter: its ``stop`` is called when
    the last gradient of a round is there. halfway: called with the running piece when its backward pass begins.
    commit: called with the piece after each backward pass if rows travel with the gradients; it returns whether the
    round is complete. name: called with an error of a backward pass; it raises another if the error only means that
    another rank is lost.
    """

    def __init__(
        self,
        device: torch.device,
        reducer: Reducer,
        terms: Terms,
        gradients: Weighing,
        round: RoundState,
        checks: Checks,
        meter: Meter,
        halfway: Callable[[Piece], None],
        commit: Callable[[Piece], bool],
        name: Callable[[BaseException], None],
    ) -> None:
        self.device, self.gradients, self._round, self._checks = device, gradients, round, checks
        self._meter, self._halfway, self._commit, self._reducer = meter, halfway, commit, reducer
        self._name = name
        self._hook = gradients if isinstance(gradients, HookWeighing) else None
        self._filled = terms.filled
        # The share of a pass between rounds: that of a second model after the step may run through this one, too.
        self._share_between = 0.0
        # On a device a pass ends long before its gradients are there, and hooks show which stream computes them.
        self._ends_with_gradient = device.type == "cpu" and reducer.waits == "behind"
        self._rows, self._hooks, self._warned = RowCheck(), list[Any](), False
        # The round's loss and count before the running pass, and this one's own count, if it may be taken back.
        self._recorded: tuple[torch.Tensor | float, float, float | None] | None = None
        trained = [p for p in gradients.parameters if p.requires_grad]
        self._last: Any = None  # a ``LastGradient``, unless ``ended`` is early enough
        if reducer.waits != "never" or self._hook is not None:
            self._last = LastGradient(trained, self._gradients_ready)
            self._hooks.append(self._last)
        if self._hook is not None:
            reducer.register_comm_hook(partial(self._share, self._hook), weigh_in_hook)
            begins = partial(self._backward_begins, self._hook)
            self._hooks.append(GradientsOfPass(trained, begins, last=False))

    def begin(self, piece: Piece, batch: Any) -> None:
        """Begin a micro-step: its batch is about to go to the loop."""
        gradients = self.gradients
        if gradients.entered is not None or not (piece.last and gradients.sums):
            gradients.begin(piece)
        if piece.samples:
            self._round.drawn(piece, self._rows.missing(batch, piece.samples))
        else:  # an empty batch adds nothing to a sum over ranks
            gradients.filler.begin()
            self._round.drawn(piece, None, not (self._filled or isinstance(batch, int)))

    def received(self, batch: Any) -> None:
        """The running micro-step's batch has come from a loader of the program's own."""
        if (piece := self._round.piece) is not None and piece.samples:
            self._round.holds(self._rows.missing(batch, piece.samples))

    def cuts(self, batch: Any) -> bool:
        """Whether the running micro-step's batch can be cut: everything in it has a row for each sample."""
        piece = self._round.piece
        if piece is None or self._round.rows is not None:
            return False
        rows = {shape[0] for shape in all_shapes(batch) or ()}
        return isinstance(batch, int) or rows == {piece.samples}

    def part(self, samples: int, first: bool, more: bool) -> None:
        """The next pass runs this many of the running micro-step's samples, see ``RoundState.cut``."""
        self.gradients.begin(self._round.cut(samples, first, more))

    @property
    def droppable(self) -> bool:
        """Whether the running pass can be taken back, since no other rank has received a part of its gradients."""
        return self._round.piece is not None and not (self._round.sends and self.gradients.sums)

    def take_back(self) -> None:
        """The running pass has failed: remove what it has left in the gradients and on record."""
        recorded, self._recorded = self._recorded, None
        if recorded is None:
            return
        self.gradients.take_back()
        loss, before, count = recorded
        self._meter.running.back_to(loss, before)
        if count is not None:
            self.gradients.count_back(self._meter.running.step, count)

    def backward(self, loss: Any, reduction: str, scaler: Any, count: Any) -> None:
        """Weight a loss and run its backward pass. Arguments: as for ``Pace.backward``."""
        if self._round.phase != DRAWN:
            self._round.passes()
        loss = self.weighted(loss, reduction, count)
        try:
            (loss if scaler is None else scaler.scale(loss)).backward()
        except LOST as error:
            self._name(error)
            raise
        self.ended()

    def weighted(self, loss: torch.Tensor, reduction: str, count: Any) -> torch.Tensor:
        """``loss`` times its weight; zero if it counts for nothing, though a mean over nothing is NaN. Its backward
        pass must follow at once, on this thread."""
        if loss.__class__ is not torch.Tensor or loss.ndim:
            check_loss(loss)
        weight = self.weight(loss, reduction, count)
        if self._ends_with_gradient and (piece := self._round.piece) is not None and piece.last:
            self._last.begins(loss)
        if weight:
            return loss if weight == 1.0 else loss * weight
        return torch.nan_to_num(loss) * 0.0

    def weight(self, loss: torch.Tensor | None, reduction: str, count: Any) -> float:
        """The weight of this micro-step's gradient. Records the loss, if given."""
        round, gradients = self._round, self.gradients
        if (piece := round.piece) is None:
            return self._weight_after_step(loss, reduction, count)
        part: float = piece.samples
        if count is not None:
            count = part = checked_count(count) * (part > 0)
        elif round.rows is not None and reduction == MEAN:
            round.refuse("rows")
        if reduction != MEAN:
            if reduction == GLOBAL:
                self._check_global(piece, count)
            part = self._part(piece, reduction)
        first = round.weighed(count)
        running = self._meter.running
        if not first:
            if not piece.samples:
                gradients.filler.again()
        elif gradients.apart:
            self._recorded = running.loss, running.count, count
        if self._checks.looks:
            self._checks.weighs(loss, piece, reduction, count, first)
        if count is not None and first:
            running.add_count(count)
        if loss is not None:
            running.add_loss(loss, part)
            if not part:
                self._counts_for_nothing(loss, piece)
        if not (piece.last or round.more):
            self._halfway(round.entire)
        return gradients.weigh(piece, part, count, first, reduction)

    def _counts_for_nothing(self, loss: torch.Tensor, piece: Piece) -> None:
        """Follows the loss of a filler sample. Warns once of a mean over nothing that is not zero, such as one over
        at least 1, whose loss is lost."""
        if not piece.samples:
            self.gradients.filler.follow(loss)
            return
        value = float(loss.detach())
        if not self._warned and value and math.isfinite(value):
            self._warned = True
            warnings.warn(
                f"round {piece.step}: a loss of {value:g} came with count=0, so that it counts for nothing. If it is "
                "that of samples, as of a detector's negatives, pass the sum with reduction='sum' and the same "
                "count=, which divides it by the count of all ranks; a penalty of no sample is right as it is",
                RuntimeWarning,
                stacklevel=timing.level(),
            )

    def _part(self, piece: Piece, reduction: str) -> float:
        """What a loss counts as a mean over, unless it is a mean with a count."""
        if wrong := _unknown(reduction):
            raise PacelineError(wrong)
        if reduction != GLOBAL:
            return piece.samples if reduction == MEAN else float(piece.samples > 0)
        if not piece.samples:
            self.gradients.filler.counts()
        return self.gradients.global_part(piece)

    def _check_global(self, piece: Piece, count: float | None) -> None:
        """Raises PacelineError if this micro-step cannot have computed a loss over the samples of all ranks."""
        wrong = (
            "it is already normalised, so leave count= out"
            if count is not None
            else self.gradients.no_global
            or (
                "a filler sample counts for nothing, and would count in a sum over ranks: multiply its part by "
                "pace.counts, or give each rank work by limits=[(1, None)] * ranks and drop_last=True"
                if not (piece.samples or self._round.asked)
                else ""
            )
        )
        if wrong:
            raise PacelineError(f"round {piece.step}: reduction='global': {wrong}")

    def ended(self) -> None:
        """The backward pass of this micro-step has ended."""
        gradients = self.gradients
        do, piece = self._round.ended()
        if gradients.apart:
            self._recorded = None
            gradients.join()
        if do is STEP:
            if not self._round.ready:  # the graph contained no hooked parameter
                gradients.filler.end()
                if self._last is not None:
                    self._last.missed()
                self._gradients_ready()
        else:
            gradients.filler.end()
            if do is COMMIT:
                piece = self._round.committed(self._commit(piece))
        gradients.done(piece)

    def close(self) -> None:
        """Remove all hooks from the model, but for DDP's communication hook, which averages from now on."""
        self._share_between = 1.0 / peers.ranks()
        self.gradients.release()
        for hook in self._hooks:
            hook.remove()

    def _weight_after_step(self, loss: torch.Tensor | None, reduction: str, count: float | None) -> float:
        """The weight of another model's loss, on the batch of a round that is over."""
        gradients = self.gradients
        piece = self._round.weighed_later()
        wrong = (
            "count= is summed over the ranks for the model of this Pace alone"
            if count is not None
            else gradients.no_second
            or "a round takes several micro-steps, and its samples are gone; use loop='whole'"
            * (not piece.first)
            or _unknown(reduction)
        )
        if wrong:
            raise PacelineError(
                f"round {piece.step}: the loss of a second model was weighted after the step: {wrong}"
            )
        if not piece.samples and reduction != GLOBAL and loss is not None:
            gradients.filler.follow(loss)
        return gradients.weight_after_step(piece, self._part(piece, reduction))

    # -- called by torch -------------------------------------------------------------------------------------

    def _share(self, gradients: HookWeighing) -> float:
        return self._share_between if (piece := self._round.piece) is None else gradients.share(piece)

    def _backward_begins(self, gradients: HookWeighing) -> None:
        """The only notice of a backward pass under the hook."""
        if not self._round.began():
            return
        piece = self._round.running
        self._halfway(piece)
        self._reducer.check_sync(piece.last and gradients.sums)
        gradients.gather(piece)
        # It runs as soon as the whole pass, and with it DDP's reduction, has ended.
        at_end_of_pass(partial(self._backward_ended, gradients))

    def _backward_ended(self, gradients: HookWeighing) -> None:
        if (piece := self._round.noticed_end(gradients.counted)) is not None:
            gradients.gathered(piece)

    def _gradients_ready(self) -> None:
        if (piece := self._round.gradients_ready()) is not None:
            self._meter.stop(piece)


class RowCheck:
    """Finds batches with fewer rows than planned samples, such as those of a collate function that drops samples.

    It reports only certain cases. All tensors of the batch have the same number of rows, and none of
    their second dimensions is a multiple of the planned number, unless an earlier batch has shown that rows count
    samples. A collate function may merge several samples into one row, as long as it does so in every batch. Lists
    count samples if they had as many entries as samples for two different numbers.
    """

    def __init__(self) -> None:
        self._whole = False  # some batch had a row for each sample
        self._listed = set[int]()  # the samples of batches whose lists had an entry for each
        self._looked = set[int]()  # numbers of samples for which a batch with as many rows was looked at

    def missing(self, batch: Any, samples: int) -> int | None:
        """The number of rows of a batch in which some of the planned samples are missing; else None."""
        if batch.__class__ in PLAIN and batch:
            first = batch[0]  # the tensor of most batches
            if first.__class__ is torch.Tensor and first.shape[:1] == (samples,):
                if samples in self._looked:
                    return None
                self._looked.add(samples)
        shapes = all_shapes(batch)
        if shapes is None:
            return self._unlisted(batch, samples)
        rows = {shape[0] for shape in shapes}
        if len(rows) != 1:
            return None
        found = rows.pop()
        # In tensors of two or more dimensions time may come first.
        seconds = [shape[1] for shape in shapes if len(shape) > 1]
        flat = len(seconds) < len(shapes)
        if found == samples and (flat or (samples not in seconds and any(n % samples for n in seconds))):
            self._whole = True
        # A list may hold one tensor or more for each sample.
        apart = isinstance(batch, list | tuple) and len(batch) % samples == 0
        later = not (flat or all(n % samples for n in seconds))
        merged = found and samples % found == 0
        return None if found >= samples or apart or ((later or merged) and not self._whole) else found

    def _unlisted(self, batch: Any, samples: int) -> int | None:
        """The length of all lists within a batch in which some of the planned samples are missing; else None."""
        parts = batch.values() if isinstance(batch, Mapping) else batch if isinstance(batch, PLAIN) else ()
        lengths = {len(part) for part in parts if isinstance(part, PLAIN)}
        if len(lengths) != 1:
            return None
        found = lengths.pop()
        if found == samples:
            self._listed.add(samples)
        return found if found < samples and len(self._listed) > 1 else None


class LastGradient:
    """Calls ``notify`` at the end of a backward pass, perhaps several times.

    A hook on each parameter notices any pass, and costs some microseconds for each parameter. If the loss that the
    pass starts from is known (``begins`` before it), one callback is enough: callbacks queued in a pass are called
    one after the other at its end, and DDP's, which waits for other ranks, is queued later.

    That does not hold if parameters get their gradients in a nested pass of their own, as under
    ``torch.utils.checkpoint`` with ``use_reentrant=True``: DDP may wait at the end of that one. So the first pass has
    the hooks as well, and they stay unless all of them were called in the pass of the loss.
    """

    def __init__(self, parameters: Sequence[torch.nn.Parameter], notify: Callable[[], None]) -> None:
        self._parameters, self._notify, self._key = parameters, notify, id(self)
        # torch's number of the pass through a loss that is known: -1 until it begins, None if no loss is known
        self._pass: int | None = None
        self._within = self._apart = False  # gradients came in the pass of the loss; in another one
        self._hooks: Any = None
        self.missed()

    def begins(self, loss: torch.Tensor) -> None:
        """The backward pass through this loss follows at once, on this thread."""
        if (first := loss.grad_fn) is not None:
            self._pass = -1
            call_in_pass(loss, first, self._key, self._queue)  # it does nothing in other passes

    def missed(self) -> None:
        """``notify`` was not called in a round's last pass, or there was none yet: notice any pass from now on."""
        self._pass = None
        if self._hooks is None:
            # Those that are trained now: the program may have frozen some.
            trained = [p for p in self._parameters if p.requires_grad]
            self._hooks = GradientsOfPass(trained, self._gradients)

    def remove(self) -> None:
        """Remove all hooks from the model."""
        self._pass = None
        if self._hooks is not None:
            self._hooks.remove()
            self._hooks = None

    def _queue(self, *_: object) -> None:
        if self._pass == -1:
            if self._hooks is None:
                self._pass = None
                at_end_of_pass(self._notify)
            else:
                self._pass = running_pass()
                at_end_of_pass(self._ends)

    def _ends(self) -> None:
        if self._within and not self._apart:
            self.remove()
        self._pass = None
        self._notify()

    def _gradients(self) -> None:
        if self._pass is not None:
            within = running_pass() == self._pass
            self._within, self._apart = self._within or within, self._apart or not within
        self._notify()


def weighing_of(
    parameters: Sequence[torch.nn.Parameter],
    device: torch.device,
    reducer: Reducer,
    terms: Terms,
    counted: Callable[[int], float | None],
    per_sample: Callable[[], float],
) -> Weighing:
    """The weighing that suits the terms of a run without local steps."""
    # Sums that carry counts are without rounding by themselves.
    kind = (
        HookWeighing
        if terms.weigh == "hook"
        else ExactWeighing
        if terms.chunk and not reducer.carries_counts
        else Weighing
    )
    apart = terms.memory and terms.fixed_micro_steps is None
    varies = terms.drop is not None
    counts: dict[str, Any] = {"counted": counted, "per_sample": per_sample}
    return kind(parameters, device, reducer, varies=varies, apart=apart, **counts)


def _unknown(reduction: str) -> str:
    """The error message for a reduction that does not exist; else ""."""
    return "" if reduction in KINDS else f"reduction={reduction!r}: expected 'mean', 'sum' or 'global'"


def check_loss(loss: Any) -> None:
    """Raises PacelineError for anything else than a tensor with one number."""
    if not isinstance(loss, torch.Tensor):
        hint = "the entry that holds it" if isinstance(loss, dict) else "what the criterion returned"
        raise PacelineError(f"the loss is {short(loss)}; expected a tensor: pass {hint}")
    if loss.ndim and loss.numel() != 1:
        raise PacelineError(
            f"the loss has shape {tuple(loss.shape)}; expected a single number: loss.mean(), or loss.sum() with "
            "reduction='sum'"
        )
