"""Steps of a rank's own, and the merge of what they have made of the parameters (``loop="local"``).

At a merge, the change of a rank's parameters since the last one takes the place of a gradient: weighted, it is summed
over the ranks, and an outer optimizer steps from where all ranks began (DiLoCo, arXiv 2311.08105, algorithm 1). With
SGD of rate 1, the default, the parameters become the weighted mean of the ranks'.
"""

from __future__ import annotations

import time
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from paceline.errors import PacelineError
from paceline.torch.gradients.reducers import Reducer
from paceline.torch.gradients.steps import Steps, learning_rate
from paceline.torch.gradients.weighing import Weighing
from paceline.torch.local import Flats, Merge
from paceline.torch.loop import Loop
from paceline.torch.passes import Passes
from paceline.torch.plan import Piece
from paceline.torch.terms import Terms
from paceline.torch.work import Work

# Numbers of a rank before its counters: that it takes part, its weight, and how large its values began.
HEAD = 3
APART = 1e-5  # by which the sizes of parameters may differ that are the same but for rounding


class LocalWeighing(Weighing):
    """Each gradient is that of a step of its own: the mean over its batch, which no other rank adds to."""

    def __init__(self, parameters: list[torch.nn.Parameter], device: torch.device, reducer: Reducer) -> None:
        super().__init__(parameters, device, reducer, by_hook=False, exact=False)
        self.exact = True  # no backward pass sums anything over the ranks
        self.many = 0.0  # what the loss is a mean over

    def weigh(self, piece: Piece, count: float | None) -> None:
        self.bring_back(piece.step)
        if piece.first:
            self._counts.begin()
        if piece.samples:  # tokens of one step and samples of another are no weight
            self._counts.add(piece.step, count, last=False)
        self.many = float(piece.samples if count is None else count)

    def weight(self, piece: Piece, part: float) -> float:
        return part / self.many if self.many else 0.0


class LocalPasses(Passes):
    """Behind each backward pass a step is due."""

    gradients: LocalWeighing

    def __init__(
        self, parameters: list[torch.nn.Parameter], device: torch.device, reducer: Reducer, *others: Any
    ) -> None:
        super().__init__(parameters, device, reducer, *others)
        self.gradients = LocalWeighing(parameters, device, reducer)
        self.stepped = False  # in the running micro-step

    def begin(self, piece: Piece, batch: Any) -> None:
        super().begin(piece, batch)
        self.stepped = False

    def ended(self) -> None:
        """The backward pass of this micro-step is through."""
        assert self.micro_step is not None
        self.micro_step.done = True
        self.gradients.ready()

    def check_taken(self) -> None:
        """Raises PacelineError if the micro-step is over, and its backward pass or its step was left out."""
        if self.micro_step is not None and not self.micro_step.done:
            super().check_taken()
        elif self.micro_step is not None and not self.stepped:
            raise PacelineError(
                f"interval {self.piece.step}: the loop went on without pace.step(optimizer); with loop='local' it is "
                "expected behind each pace.backward(loss), since the last one of an interval merges"
            )

    def _weight_behind(self, reduction: str, count: float | None) -> NoReturn:
        raise PacelineError(
            "pace.weighted() weighs the loss of a second model by a round's samples, and with loop='local' each rank "
            "steps by itself; make a Pace for each model"
        )


class LocalSteps:
    """This rank's steps of the running interval. ``begin`` with its first batch; ``step`` after each backward pass;
    ``back`` if it is left.

    model: whose parameters and buffers are merged: floating buffers as parameters are, but without the outer
    optimizer; of whole numbers, such as batch norm's counter, the largest of any rank is taken.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        terms: Terms,
        passes: LocalPasses,
        steps: Steps,
        work: Work,
        reducer: Reducer,
    ) -> None:
        assert terms.merge is not None
        self._model, self._passes, self._steps = model, passes, steps
        self._work, self._reducer = work, reducer
        self._merge: Merge = terms.merge
        self._parameters = [p for p in model.parameters() if p.requires_grad]
        if any(value.is_complex() for value in (*model.parameters(), *model.buffers())):
            raise PacelineError("loop='local': the model has complex numbers, which nobody has merged yet")
        self._outer = self._merge.optimizer(self._parameters)
        buffers = dict(model.named_buffers())
        self._floats = [name for name, buffer in buffers.items() if buffer.is_floating_point()]
        self._wholes = [name for name in buffers if name not in self._floats]
        self._counters = [name for name in self._wholes if buffers[name].numel() == 1]
        self.flats = Flats(self._values(), HEAD + len(self._counters))
        self.stepping = False  # an optimizer, right now
        self._start: list[torch.Tensor] | None = None  # what the values were when the interval began
        self._before: list[torch.Tensor] = []  # and the buffers of whole numbers
        self._counted, self._taken = 0.0, 0  # samples or the like, and steps
        self.hook = model.register_forward_pre_hook(_refuse_wrapped)

    def begin(self) -> None:
        """An interval begins."""
        self._start = [value.detach().clone() for value in self._values()]
        self._before = [self._model.get_buffer(name).clone() for name in self._wholes]
        self._counted, self._taken = 0.0, 0

    def back(self) -> None:
        """The interval was left: what this rank has made of the parameters since it began does not count."""
        if self._start is not None:
            with torch.no_grad():
                for value, start in zip(self._values(), self._start, strict=True):
                    value.copy_(start)
                for name, before in zip(self._wholes, self._before, strict=True):
                    self._model.get_buffer(name).copy_(before)
        self.keep()

    def keep(self) -> None:
        """No interval is running; the parameters stay what they are."""
        self._start = None

    def step(self, optimizers: list[Any], scaler: Any) -> tuple[bool, bool]:
        """This rank's own step, and behind the interval's last one the merge. Returns whether the optimizers have
        stepped, and whether the interval is over.

        Raises PacelineError where no step is due."""
        passes, work, reducer = self._passes, self._work, self._reducer
        self._check_due()
        micro_step, many = passes.micro_step, passes.gradients.many
        assert micro_step is not None
        piece, stepped = micro_step.piece, many > 0
        passes.stepped = True
        self.stepping = True
        try:
            if stepped:
                passes.gradients.check_there(piece, optimizers)
                self._steps.taken = []
                self._steps.take(optimizers, scaler, heard=False)
            else:  # samples that count for nothing
                for one in optimizers:
                    one.zero_grad()
        finally:
            self.stepping = False
        passes.gradients.used()
        self._counted += many
        self._taken += stepped
        began = time.perf_counter()
        if piece.last or reducer.retrying:
            self._fill(piece.batch)
        if reducer.travels:
            micro_step.piece = piece = work.commit(piece)
        elif piece.last:
            work.meter.stop(piece)
            began = time.perf_counter()
            reducer.merge(self.flats.own, self._merge.send)
        if piece.last:
            if not reducer.late:  # else it was handed over, merged
                self._apply(piece.step)
            work.meter.link = time.perf_counter() - began
            self._start = None
        return stepped, piece.last

    def check_ours(self) -> None:
        """Raises PacelineError for a step of an optimizer that is not taken by ``step``."""
        if not self.stepping:
            raise PacelineError(
                "optimizer.step() was called by the program; with loop='local' expected pace.step(optimizer) behind "
                "each pace.backward(loss), which also merges; closures, as LBFGS needs, have no place in it"
            )

    def state_dict(self) -> dict[str, Any]:
        """The model as it was when the running interval began, or as it is between two, for a rank that joins."""
        values = [*self._values(), *(self._model.get_buffer(name) for name in self._wholes)]
        began = (
            {}
            if self._start is None
            else {
                id(value): start for value, start in zip(values, [*self._start, *self._before], strict=True)
            }
        )
        model = {
            name: began.get(id(value), value.detach() if isinstance(value, torch.Tensor) else value)
            for name, value in self._model.state_dict(keep_vars=True).items()
        }
        return {"model": model, "outer": self._outer.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what another rank's ``state_dict`` gave."""
        self._model.load_state_dict(state["model"])
        self._outer.load_state_dict(state["outer"])

    def outer_state(self) -> dict[str, Any]:
        """The outer optimizer's, for a checkpoint; empty if it has none."""
        state = self._outer.state_dict()
        return state if state["state"] else {}

    def load_outer(self, state: Any) -> None:
        """Take over what ``outer_state`` gave, by the rates that are chosen now; what was there before goes."""
        own = self._outer.state_dict()
        self._outer.load_state_dict({**own, "state": state["state"] if state else {}})

    # -- within ----------------------------------------------------------------------------------------------

    def _values(self) -> list[torch.Tensor]:
        """What is merged by its change: parameters, then floating buffers."""
        return [*self._parameters, *(self._model.get_buffer(name) for name in self._floats)]

    def _check_due(self) -> None:
        passes = self._passes
        if passes.micro_step is None or passes.stepped:
            raise PacelineError(
                "pace.step() was called twice for one batch, or outside of the loop; with loop='local' expected one "
                "call behind each pace.backward(loss), with all optimizers in a list: pace.step([first, second])"
            )
        if not passes.micro_step.done:
            raise PacelineError(
                f"interval {passes.piece.step}: pace.step() was called before pace.backward(loss); expected it behind"
            )

    def _fill(self, batch: int) -> None:
        """This rank's change since the interval of ``batch`` samples began, with its weight."""
        assert self._start is not None
        counters = []
        for name, before in zip(self._wholes, self._before, strict=True):
            now = self._model.get_buffer(name)
            if name in self._counters:
                counters.append(float(now))
            elif not torch.equal(now, before):
                raise PacelineError(
                    f"loop='local': buffer {name} holds {now.numel()} whole numbers, and the steps of a rank change "
                    "it; of those a merge can make nothing: keep them in a floating tensor, which is averaged"
                )
        by = self._merge.by
        weight = (
            self._counted / batch if by == "samples" else self._taken if by == "steps" else self._taken > 0
        )
        size = sum(
            float(start.abs().sum(dtype=torch.float64)) for start in self._start[: len(self._parameters)]
        )
        self.flats.fill(self._start, self._values(), float(weight), [1.0, float(weight), size, *counters])

    @torch.no_grad()
    def _apply(self, step: int) -> None:
        """The sums are there: the outer optimizer's step."""
        assert self._start is not None
        values = self._values()
        changes, table = self.flats.read(values)
        present, weights, sizes = table[:, 0] > 0, table[:, 1], table[:, 2]
        self._check_alike(step, present, sizes)
        whole, parameters = float(weights.sum()), len(self._parameters)
        for number, (value, start, change) in enumerate(zip(values, self._start, changes, strict=True)):
            mean = change.div_(whole) if whole else change.zero_()
            value.copy_(start)
            if number < parameters:
                value.grad = mean.to(value.dtype)
            else:
                value.sub_(mean)
        self.stepping = True
        try:
            self._outer.step()
        finally:
            self.stepping = False
        for parameter in self._parameters:
            parameter.grad = None
        counting = weights > 0 if whole else present
        for name, most in zip(self._counters, table[counting, HEAD:].amax(0).tolist(), strict=True):
            self._model.get_buffer(name).fill_(most)

    def _check_alike(self, step: int, present: torch.Tensor, sizes: torch.Tensor) -> None:
        """Raises PacelineError if some ranks began the interval with other parameters."""
        usual = sizes[present].quantile(0.5)
        apart = present & ((sizes - usual).abs() > APART * usual.abs())
        if apart.any():
            ranks = ", ".join(map(str, apart.nonzero().flatten().tolist()))
            raise PacelineError(
                f"interval {step} began with other parameters on rank {ranks}; expected the same on all: load "
                "checkpoints on every rank, and change parameters on all ranks alike"
            )


def _refuse_wrapped(model: torch.nn.Module, *_: Any) -> None:
    """Before a forward pass: DDP around the model would sum its gradients in each of a rank's own steps."""
    if (
        DistributedDataParallel._active_ddp_module is not None
        and torch.is_grad_enabled()
        and dist.get_world_size() > 1
    ):
        raise PacelineError(
            "the model was called through DistributedDataParallel, and with loop='local' each rank steps by itself; "
            "expected the plain module that Pace was given: model(x) instead of ddp(x)"
        )


class LocalLoop(Loop):
    """A loop in which an interval is a round, and each of its micro-steps a step of this rank's own."""

    PASSES: type[Passes] = LocalPasses
    passes: LocalPasses

    local: LocalSteps

    @property
    def due(self) -> bool:
        passes = self.passes
        return passes.micro_step is not None and passes.micro_step.done and not passes.stepped

    def abandon(self) -> None:
        """As its base; the parameters are those of the last merge."""
        if self.in_round:
            self.local.back()
        super().abandon()

    def close(self) -> None:
        self.local.back()  # a loop that has failed may be left only later, when others are at work with the model
        self.local.hook.remove()
        super().close()

    def stands(self) -> dict[str, Any]:
        return {
            **super().stands(),
            "every": self.terms.every.state_dict(self.progress.rounds),
            "outer": self.local.outer_state(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.local.keep()  # what was loaded into the model before, even if an interval is left only now
        if self.in_round:
            self.abandon()
        self.terms.every.load_state_dict(state.get("every"))
        self.local.load_outer(state.get("outer"))

    def step(self, optimizers: list[Any], scaler: Any) -> bool:
        """This rank's own step, and behind an interval's last one the merge. True when the optimizers stepped."""
        self._steps.check_ours(optimizers)
        with self.named():
            stepped, self.merged = self.local.step(optimizers, scaler)
        if self.merged:
            if self._meter.running is not None:
                self._meter.running.learning_rate = learning_rate(optimizers)
            super().stepped(0.0)
        return stepped

    def stepped(self, seconds: float | None) -> None:
        raise PacelineError(
            "loop='local' is for a loop of your own, which calls pace.step(optimizer); a framework that steps the "
            "optimizer by itself needs another loop="
        )

    def _steps_by_itself(self, model: torch.nn.Module) -> LocalSteps:
        if not self.terms.every.fixed:
            self._rounds.every = self.terms.every
        return LocalSteps(model, self.terms, self.passes, self._steps, self.work, self._reducer)

    def _begin(self, piece: Piece, batch: Any) -> None:
        if not self.in_round:
            self.local.begin()
        super()._begin(piece, batch)

    def _step_begins(self, optimizer: torch.optim.Optimizer, closure: bool) -> None:
        self.local.check_ours()

    def _step_ended(self, optimizer: torch.optim.Optimizer) -> None:
        """It was one of ``step``."""
