"""The backward passes of a loop's micro-steps: the weight of each gradient, and when a round's last one is ready."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NoReturn

import torch

from paceline.errors import PacelineError, short
from paceline.torch import peers
from paceline.torch.gradients.reducers import Reducer, weigh_in_hook
from paceline.torch.gradients.weighing import Weighing, checked_count
from paceline.torch.measuring.measure import LastGradient
from paceline.torch.measuring.meter import Meter
from paceline.torch.plan import Piece
from paceline.torch.suspects import LossWatch
from paceline.torch.terms import Terms

PLAIN = list, tuple
MEAN, SUM, GLOBAL = "mean", "sum", "global"
NO_ROUND = "no round is running; expected this within `for ... in pace.loader(...)`"


class MicroStep:
    """One micro-step, from its batch to the end of its round or the next micro-step."""

    recorded: tuple[torch.Tensor, float, float | None] | None = None  # the loss, part and count on record
    weighed = False  # its loss has its weight
    begun = False  # under the hook: its backward pass has begun
    prepared = False  # the next backward pass, of any loss, sums its gradients over the ranks
    done = more = False  # its backward pass has ended; further passes follow this one
    complete = False  # all gradients of its round are there, and an optimizer step is due
    asked = False  # the loop knows whether its samples count

    def __init__(self, piece: Piece, whole: Piece, rows: int | None) -> None:
        self.piece = piece  # the samples of its next backward pass
        self.whole = whole  # the samples of all its passes
        self.rows = rows  # rows of its batch, if some of the piece's samples are missing there; else None

    def refuse_rows(self) -> NoReturn:
        """Raises PacelineError, since a mean over the rows would count as one over all samples."""
        raise PacelineError(
            f"round {self.piece.step}: the batch has {self.rows} rows; expected the {self.piece.samples} planned "
            "samples, or pace.backward(loss, count=...) with the number that the loss is a mean over"
        )


class RowCheck:
    """Finds batches with fewer rows than planned samples, such as those of a collate function that drops samples.

    It reports only certain cases: all tensors of the batch have the same number of rows, and none of their dimensions
    is the planned number or a multiple of it. A collate function may merge several samples into one row, as long as
    it does so in every batch.
    """

    def __init__(self) -> None:
        self._whole = False  # some batch had a row for each sample

    def missing(self, batch: Any, samples: int) -> int | None:
        """The number of rows of a batch in which some of the planned samples are missing; else None."""
        first = batch[0] if batch.__class__ in PLAIN and batch else None  # the tensor of most batches
        if first.__class__ is torch.Tensor and first.shape[:1] == (samples,):
            self._whole = True
            return None
        shapes = _shapes(batch)
        rows = {shape[0] for shape in shapes or ()}
        if shapes is None or len(rows) != 1:
            return None
        found = rows.pop()
        self._whole = self._whole or found == samples
        # A list may hold one tensor or more for each sample.
        apart = isinstance(batch, list | tuple) and len(batch) % samples == 0
        # In tensors of two or more dimensions time may come first.
        later = min(map(len, shapes)) > 1 and any(shape[1] % samples == 0 for shape in shapes)
        merged = found and samples % found == 0 and not self._whole
        return None if found >= samples or apart or later or merged else found


def _shapes(batch: Any) -> list[tuple[int, ...]] | None:
    """The shapes of a batch's tensors and texts; None if it also holds objects that may have rows of their own."""
    if isinstance(batch, torch.Tensor):
        return [tuple(batch.shape)] if batch.ndim else []
    if isinstance(batch, int | float | None):
        return []
    if isinstance(batch, list | tuple) and all(isinstance(value, str | bytes) for value in batch):
        return [(len(batch),)]
    if isinstance(batch, Mapping | list | tuple):
        found: list[tuple[int, ...]] = []
        for value in batch.values() if isinstance(batch, Mapping) else batch:
            nested = isinstance(value, list | tuple) and not all(
                isinstance(one, str | bytes) for one in value
            )
            shapes = None if nested else _shapes(value)
            if shapes is None:
                return None
            found += shapes
        return found
    return None


class Passes:
    """Follows the micro-steps of a loop. Call ``begin`` for each, ``weight`` before its backward pass and ``ended``
    after it; under the hook DDP replaces the latter two calls. ``micro_step`` is None once the round is over or left.

    meter: its ``stop`` is called when the last gradient of a round's last piece is there, perhaps several times.
    halfway: called with the running piece when its backward pass begins. commit: called with the piece after each
    backward pass if rows travel with the gradients; it returns the piece, marked last only if the round is complete.
    """

    def __init__(
        self,
        parameters: Sequence[torch.nn.Parameter],
        device: torch.device,
        reducer: Reducer,
        terms: Terms,
        meter: Meter,
        halfway: Callable[[Piece], None],
        commit: Callable[[Piece], Piece],
    ) -> None:
        self.micro_step: MicroStep | None = None  # the running one
        self.ran = 0  # samples that count, of the micro-steps so far of a round that has several
        self.over: Piece | None = None  # the last piece of a round that is over, until the next micro-step
        self._meter, self._halfway = meter, halfway
        self._commit = commit if reducer.travels else None
        self._by_hook = terms.weigh == "hook"
        self._fills, self._varies = terms.fills, terms.drop is not None
        self.device = device
        self._reducer = reducer
        # On a device a pass ends long before its gradients are there, and hooks show which stream computes them.
        self._ends_with_gradient = device.type == "cpu" and reducer.waits == "behind"
        self.gradients = Weighing(
            parameters,
            device,
            reducer,
            by_hook=self._by_hook,
            exact=bool(terms.cell) and not reducer.travels,  # such a reducer sums without rounding by itself
            varies=self._varies,
            counted=meter.counted_by_all,
        )
        trained = [p for p in parameters if p.requires_grad]
        self._rows, self._hooks = RowCheck(), list[Any]()
        self.watch = LossWatch(self._watched, peers.ranks(), self._by_hook)
        self._last: Any = None  # a ``LastGradient``, unless ``ended`` is early enough
        if reducer.waits != "never" or self._by_hook:
            self._last = LastGradient(trained, self._gradients_ready)
            self._hooks.append(self._last)
        if self._by_hook:
            reducer.register_comm_hook(self._hook_weight, weigh_in_hook)
            hook = torch.autograd.graph.register_multi_grad_hook
            self._hooks.append(hook(trained, self._backward_begins, mode="any"))

    @property
    def piece(self) -> Piece:
        """The piece that the running micro-step runs. Raises PacelineError between rounds."""
        if self.micro_step is None:
            raise PacelineError(NO_ROUND)
        return self.micro_step.piece

    @property
    def complete(self) -> bool:
        """True when the round's gradients are all there, and an optimizer step is due."""
        return self.micro_step is not None and self.micro_step.complete

    def begin(self, piece: Piece, batch: Any) -> None:
        """Begin a micro-step: its batch is about to go to the loop."""
        gradients = self.gradients
        if gradients.exact or gradients.entered is not None or not piece.last:
            gradients.begin(piece)
            self.ran = piece.samples if piece.first else self.ran + piece.samples
        if piece.samples:
            micro_step = MicroStep(piece, piece, self._rows.missing(batch, piece.samples))
        else:
            micro_step = MicroStep(piece, piece, None)
            # An empty batch adds nothing to a sum over ranks.
            micro_step.asked = not (self._fills or isinstance(batch, int))
        self.micro_step, self.over = micro_step, None

    def cuts(self, batch: Any) -> bool:
        """Whether the running micro-step's batch can be cut: everything in it has a row for each sample."""
        micro_step = self.micro_step
        if micro_step is None or micro_step.rows is not None:
            return False
        rows = {shape[0] for shape in _shapes(batch) or ()}
        return isinstance(batch, int) or rows == {micro_step.piece.samples}

    def part(self, samples: int, first: bool, more: bool) -> None:
        """The next pass runs this many of the running micro-step's samples. first: it is the micro-step's first
        pass. more: further passes follow it."""
        assert self.micro_step is not None
        whole = self.micro_step.whole
        piece = whole._replace(samples=samples, first=whole.first and first, last=whole.last and not more)
        self.gradients.begin(piece)
        self.micro_step = MicroStep(piece, whole, None)
        self.micro_step.more = more

    @property
    def droppable(self) -> bool:
        """Whether the running pass can be taken back, since no other rank has received a part of its gradients."""
        micro_step = self.micro_step
        return micro_step is not None and not (
            (micro_step.weighed or micro_step.prepared) and micro_step.piece.last and self.gradients.sums
        )

    def prepared(self) -> None:
        """The running pass's forward pass has ended, and the next backward pass sums its gradients."""
        if self.micro_step is not None:
            self.micro_step.prepared = True

    def take_back(self) -> None:
        """The running pass has failed: remove what it has left in the gradients and on record."""
        micro_step = self.micro_step
        if micro_step is None or not micro_step.weighed:
            return
        self.gradients.take_back()
        if micro_step.recorded is not None:
            loss, part, count = micro_step.recorded
            self._meter.add_loss(loss, -part)
            if count is not None:
                self._meter.add_count(-count)
                self.gradients.count_back(micro_step.piece.step, count)

    def refuse(self, loss: Any) -> NoReturn:
        """Raises PacelineError, since the loss is not a tensor, or a backward pass is not due."""
        check_loss(loss)
        micro_step = self.micro_step
        if micro_step is None:
            raise PacelineError(
                "pace.backward() was called outside of `for ... in pace.loader(...)`"
                if self.over is None
                else f"pace.backward() was called after the step of round {self.over.step}; expected it once a "
                "round, before pace.step(optimizer): for the loss of a second model, pace.weighted(loss).backward()"
            )
        raise PacelineError(
            f"round {micro_step.piece.step}: pace.backward() was called twice in one micro-step of the loop; "
            "expected one call: add the losses, and call it with the sum"
        )

    def weighted(self, loss: torch.Tensor, reduction: str, count: Any) -> torch.Tensor:
        """``loss`` times its weight; zero if it counts for nothing, though a mean over nothing is NaN. Its backward
        pass must follow at once, on this thread."""
        weight = self.weight(loss, reduction, None if count is None else checked_count(count))
        step = self.micro_step
        if self._ends_with_gradient and step is not None and step.piece.last:
            self._last.begins(loss, partial(self._meter.stop, step.whole))
        if weight:
            return loss if weight == 1.0 else loss * weight
        return torch.nan_to_num(loss) * 0.0

    def weight(self, loss: torch.Tensor | None, reduction: str, count: float | None) -> float:
        """The weight of this micro-step's gradient. Records the loss, if given."""
        micro_step = self.micro_step
        if micro_step is None:
            return self._weight_behind(reduction, count)
        piece = micro_step.piece
        many: float = piece.samples
        if count is not None:
            count = many = count * (many > 0)
            if not micro_step.weighed:
                self._meter.add_count(many)
        elif micro_step.rows is not None and reduction == MEAN:
            micro_step.refuse_rows()
        gradients = self.gradients
        if reduction == MEAN:
            part = many
        elif reduction == SUM:
            part = float(many > 0)
        elif reduction == GLOBAL:
            self._check_global(micro_step, count)
            part = gradients.whole(piece)
        else:
            raise PacelineError(f"reduction={reduction!r}: expected 'mean', 'sum' or 'global'")
        if self.watch.left and count is None:
            self.watch.look(loss, piece, reduction)
        if loss is not None:
            self._meter.add_loss(loss, part)
            if gradients.apart:
                micro_step.recorded = loss.detach(), part, count
        if not (piece.last or micro_step.more):
            self._halfway(micro_step.whole)
        if not micro_step.weighed:
            micro_step.weighed = True
            gradients.weigh(piece, count)
        if not self._by_hook:
            self._reducer.check_sync(piece.last and not gradients.exact)
            return gradients.weight(piece, part)
        if reduction == GLOBAL:
            gradients.counts_as(part)
        if count == 0:  # the hook applies the weight of a mean
            return 0.0
        return 1.0 / max(many, 1) if reduction == SUM else 1.0

    def _check_global(self, micro_step: MicroStep, count: float | None) -> None:
        """Raises PacelineError if this micro-step cannot have computed a loss over the samples of all ranks."""
        wrong = (
            "it is already normalised, so leave count= out"
            if count is not None
            else "drop= leaves out samples that the loss was normalised with; leave it out"
            if self._varies
            else "with elastic=True there is no process group of all ranks, over which it could be one; pass a mean, "
            "a sum or count="
            if self._commit is not None
            else "a filler sample counts for nothing, and would count in a sum over ranks: multiply its part by "
            "pace.counts, or give each rank work by limits=[(1, None)] * ranks and drop_last=True"
            if not (micro_step.piece.samples or micro_step.asked)
            else ""
        )
        if wrong:
            raise PacelineError(f"round {micro_step.piece.step}: reduction='global': {wrong}")

    def ended(self) -> None:
        """The backward pass of this micro-step has ended."""
        micro_step, gradients = self.micro_step, self.gradients
        if micro_step is None:
            raise PacelineError(NO_ROUND)
        piece = micro_step.piece
        if not (micro_step.weighed or self._by_hook):
            raise PacelineError(
                f"round {piece.step}: pace.host.backward_done() was called before pace.host.weight(loss); expected "
                "the loss to be multiplied by that weight first"
            )
        micro_step.done = True
        if gradients.apart:
            gradients.join()
            if micro_step.more:
                gradients.done(piece)
                return
            micro_step.piece = piece = micro_step.whole
        if self._commit is not None:
            micro_step.piece = piece = self._commit(piece)
        if piece.last:
            if self._last is not None:
                self._last.ended()
            if not self._meter.stopped:  # the graph contained no hooked parameter
                self._meter.stop(piece)
            micro_step.complete = True
        gradients.done(piece)

    def check_taken(self) -> None:
        """Raises PacelineError if the micro-step is over, and its backward pass was left out."""
        if self.micro_step is None:
            return  # step() has ended the round
        piece = self.micro_step.piece
        if not self.micro_step.done:
            how = "loss.backward()" if self._by_hook else "pace.backward(loss)"
            raise PacelineError(
                f"round {piece.step}: the loop went on without {how}; call it once for each micro-batch that the "
                "loader yields"
            )
        if piece.last and not self.micro_step.complete:
            if not self._meter.stopped:
                raise PacelineError(f"round {piece.step}: the loop went on without a backward pass")
            self._refuse_undivided(piece.step)

    def check_complete(self) -> None:
        """Raises PacelineError if an optimizer steps before its step is due."""
        micro_step = self.micro_step
        if micro_step is None or micro_step.complete:
            return
        step = micro_step.piece.step
        if self._by_hook and micro_step.done and micro_step.piece.last and self._meter.stopped:
            self._refuse_undivided(step)
        others = self._meter.stopped or (not micro_step.weighed and self.gradients.there())
        if micro_step.piece.last and not micro_step.done and others:
            raise PacelineError(
                f"round {step}: optimizer.step() was called after a backward pass that is not Paceline's, "
                "whose gradient is not weighted; call pace.backward(loss) in its place"
            )
        raise PacelineError(
            f"optimizer.step() was called within round {step}, before all its gradients were there; "
            "expected pace.step(optimizer), which steps when the round is complete"
        )

    def _refuse_undivided(self, step: int) -> NoReturn:
        raise PacelineError(
            f"round {step}: pace.weighted(loss, count=...).backward() under weigh='hook' leaves a gradient that is "
            "not divided by the count of all ranks; call pace.backward(loss, count=...) in its place"
        )

    def close(self) -> None:
        """Remove all hooks from the model."""
        self.watch.close()
        self.gradients.release()
        for hook in self._hooks:
            hook.remove()

    def _weight_behind(self, reduction: str, count: float | None) -> float:
        """The weight of another model's loss, on the batch of a round that is over."""
        piece = self.over
        if piece is None:
            raise PacelineError(
                "pace.host.weight() or pace.weighted() was called outside of `for ... in pace.loader(...)`"
            )
        wrong = (
            "count= is summed over the ranks for the model of this Pace alone"
            if count is not None
            else "a round takes several micro-steps, and its samples are gone; use loop='whole'"
            if not piece.first
            else "elastic=True sums the gradients of one model only"
            if self._reducer.travels
            else f"reduction={reduction!r}: expected 'mean', 'sum' or 'global'"
            if reduction not in (MEAN, SUM, GLOBAL)
            else ""
        )
        if wrong:
            raise PacelineError(
                f"round {piece.step}: the loss of a second model was weighted after the step: {wrong}"
            )
        self.gradients.another()
        gradients = self.gradients
        part = piece.samples if reduction == MEAN else float(piece.samples > 0)
        return gradients.weight(piece, gradients.whole(piece) if reduction == GLOBAL else part)

    def _watched(self) -> Piece | None:
        """The piece of the running micro-step, until its round's step."""
        return None if self.micro_step is None else self.micro_step.piece

    # -- called by torch -------------------------------------------------------------------------------------

    def _hook_weight(self) -> float:
        # A second model's backward pass after the round's step may run through this model, too.
        return self.gradients.share(self.piece) if self.micro_step is not None else 0.0

    def _backward_begins(self, _: object) -> None:
        """The only notice of a backward pass under the hook."""
        micro_step = self.micro_step
        if micro_step is None or micro_step.begun:
            return
        micro_step.begun = True
        if micro_step.rows is not None and not micro_step.weighed:
            micro_step.refuse_rows()
        self._halfway(micro_step.piece)
        self._reducer.check_sync(micro_step.piece.last and not self.gradients.exact)
        self.gradients.gather(micro_step.piece)
        # It runs as soon as the whole pass, and with it DDP's reduction, has ended.
        torch.autograd.Variable._execution_engine.queue_callback(self._backward_ended)

    def _backward_ended(self) -> None:
        if (micro_step := self.micro_step) is not None:
            micro_step.done = True
            # With a count, ``ended`` still divides by that of all ranks.
            micro_step.complete = self._meter.stopped and micro_step.piece.last and not self.gradients.counted
            self.gradients.gathered(micro_step.piece)

    def _gradients_ready(self) -> None:
        micro_step = self.micro_step
        if micro_step is not None and micro_step.piece.last:
            self._meter.stop(micro_step.whole)


def check_loss(loss: Any) -> None:
    if not isinstance(loss, torch.Tensor):
        hint = "the entry that holds it" if isinstance(loss, dict) else "what the criterion returned"
        raise PacelineError(f"the loss is {short(loss)}; expected a tensor: pass {hint}")
