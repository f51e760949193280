"""Merges the parameters of ranks that step by themselves (LocalSGD).

At a merge, the change of a rank's parameters since the last merge takes the place of a gradient: weighted, it is
summed over the ranks, and an outer optimizer steps from the parameters with which all ranks began (DiLoCo, arXiv
2311.08105, algorithm 1). With SGD of rate 1, the default, the result is the weighted mean of the ranks' parameters.

With a delay, the sum of interval t's changes runs during the steps of interval t+1. At the end of t+1 the outer
optimizer steps from the base that is the same on all ranks, b' = outer(b, mean c(t)), and rank i continues from
b' - c_i(t+1): its own change that is on its way stays in its parameters until the next base contains it, so that the
base contains each change once. Streaming DiLoCo (arXiv 2501.18512) mixes a part of b' into parameters that have moved
on; eager updates (arXiv 2502.12996) use the rank's own share in place of the mean until the mean is there. Here
nothing is mixed: the base is that of merges without a delay, of changes whose starting points lie one interval back.
"""

from __future__ import annotations

import copy
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch

from paceline.errors import PacelineError
from paceline.torch import peers, timing
from paceline.torch.gradients.reducers import Sums
from paceline.torch.gradients.weighing import put
from paceline.torch.liveness.calls import Calls
from paceline.torch.local import Merge
from paceline.torch.local_frozen import Frozen
from paceline.torch.local_projection import Projection
from paceline.torch.members import Ranks
from paceline.torch.steps import learning_rate
from paceline.torch.whole_state import load_whole_state, whole_state

# Numbers of a rank before its counters: a 1 for its presence, its weight, the projection and the norm of the
# parameters with which it began, and its learning rate.
HEAD = 5


class Flats(Sums):
    """The tensors that the ranks sum at a merge: one for all changes of a kind, and a table with a row for each rank.
    If ranks may be lost, a ``Member`` sums them after the step, in place of gradients."""

    def __init__(self) -> None:
        self._rank, self._ranks = peers.rank(), peers.ranks()
        self.own: list[torch.Tensor] = []

    def fill(
        self, before: Sequence[torch.Tensor], now: Sequence[torch.Tensor], weight: float, row: list[float]
    ) -> None:
        """Set the changes of the values since ``before``, times ``weight``, and this rank's row of the table."""
        self.own = []
        for (wide, _), numbers in _kinds(now).items():
            changes = [change(before[n].to(wide), now[n].detach().to(wide)).flatten() for n in numbers]
            flat = torch.cat(changes)  # a buffer that is a mean over nothing may hold NaN, and has no weight
            self.own.append(flat.mul_(weight) if weight else flat.zero_())
        device = now[0].device if now else torch.device("cpu")
        table = torch.zeros((self._ranks, len(row)), dtype=torch.float64, device=device)
        table[self._rank] = torch.tensor(row, dtype=torch.float64)
        self.own.append(table)

    def finish(self, sum: Any) -> list[Any]:
        """Start the sums, of a copy, since a failed sum leaves undefined values. Returns the works to wait for."""
        self._total = [flat.clone() for flat in self.own]
        return [sum(flat) for flat in self._total]

    def apply(self, used: Sequence[bool], factor: float = 1.0) -> None:
        """Replace the values by their sums, which are all there."""
        self.own = self._total


def _kinds(values: Sequence[torch.Tensor]) -> dict[tuple[torch.dtype, torch.device], list[int]]:
    """The indices of the values that are summed in one tensor, by the tensor's precision and device."""
    kinds: dict[tuple[torch.dtype, torch.device], list[int]] = {}
    for number, value in enumerate(values):
        wide = torch.float64 if value.dtype == torch.float64 else torch.float32
        kinds.setdefault((wide, value.device), []).append(number)
    return kinds


def read(own: Sequence[torch.Tensor], now: Sequence[torch.Tensor]) -> tuple[list[torch.Tensor], torch.Tensor]:
    """The sums in ``own``: changes in the shapes of the values ``now``, and the table, (ranks, columns)."""
    changes: list[Any] = [None] * len(now)
    for flat, numbers in zip(own, _kinds(now).values(), strict=False):
        for number, part in zip(numbers, flat.split([now[n].numel() for n in numbers]), strict=True):
            changes[number] = part.view(now[number].shape)
    return changes, own[-1].cpu()


def change(before: torch.Tensor, now: torch.Tensor) -> torch.Tensor:
    """``before`` minus ``now``; zero where they are equal, also for the infinities of masks."""
    return torch.where(before == now, 0.0, before - now)


class Flight(NamedTuple):
    """Changes that are on their way. own: their sums and the table, once ``wait`` has returned; it returns the
    seconds that the sums took. changes: this rank's change of each parameter, if the rank continues meanwhile."""

    own: list[torch.Tensor]
    wait: Callable[[], float]
    changes: list[torch.Tensor]


def state(stepper: Any) -> Any:
    """What steps change in an optimizer (its state without its options) or in a GradScaler (all of it)."""
    whole = stepper.state_dict()
    return whole["state"] if "param_groups" in whole else whole


class Merges:
    """Merges the parameters and buffers of a model. Call ``begin`` for an interval; ``took`` after each step; at its
    end ``fill``, then ``send`` and ``take_in``, or ``apply`` if the members have summed; ``back`` if it is left.

    Floating buffers are merged as parameters are, but without the outer optimizer; buffers of whole numbers, such as
    batch norm's counter, get the largest value of any rank. Both stay a rank's own until no change is on its way.
    Parameters that require no gradient are not merged: see ``Frozen``.
    """

    def __init__(self, model: torch.nn.Module, merge: Merge, ranks: Ranks) -> None:
        self._model, self._merge, self._ranks = model, merge, ranks
        self._parameters = [p for p in model.parameters() if p.requires_grad]
        if any(value.is_complex() for value in (*model.parameters(), *model.buffers())):
            raise PacelineError("LocalSGD: the model has complex numbers, which merges do not support yet")
        self._outer = merge.optimizer(self._parameters)
        # A single rank may change what it likes, unless other ranks may join it.
        self._frozen = Frozen({} if ranks.merging and peers.ranks() == 1 else dict(model.named_parameters()))
        buffers = dict(model.named_buffers())
        self._floats = [name for name, buffer in buffers.items() if buffer.is_floating_point()]
        self._wholes = [name for name in buffers if name not in self._floats]
        self._counters = [name for name in self._wholes if buffers[name].numel() == 1]
        self.flats, self._projection = Flats(), Projection(self._parameters)
        self.stepping = False  # an optimizer is stepping right now
        self._seconds = 0.0  # that the newest sum took
        self.flights: deque[Flight] = deque()
        self._start: list[torch.Tensor] | None = None  # the values when the interval began
        self._before: list[torch.Tensor] = []  # the buffers of whole numbers when the interval began
        self.base: list[torch.Tensor] = []  # the values without changes on their way; the same on all ranks
        self._counted, self._taken = 0.0, 0  # samples or the like, and steps, of this rank in the interval
        # The optimizers and scalers that have stepped in the interval, with their states before their first step.
        self._kept: list[tuple[Any, Any]] = []
        self._aside, self._warned = Calls("merging"), False
        if ranks.merging is not None:
            ranks.merging.connect(merge)

    def begin(self) -> None:
        """Begin an interval."""
        self._start = [value.detach().clone() for value in self._values()]
        if not self.flights:
            self.base = [*self._start]
        self._before = [self._model.get_buffer(name).clone() for name in self._wholes]
        self._counted, self._taken = 0.0, 0
        self._kept = []
        self._frozen.begin()

    @contextmanager
    def steps(self, steppers: Sequence[Any] = ()) -> Iterator[None]:
        """Optimizers step within. steppers: those of this rank, and scalers, whose states are kept for an interval
        that is left."""
        for one in steppers:
            if not any(one is kept for kept, _ in self._kept):
                self._kept.append((one, copy.deepcopy(state(one))))
        self.stepping = True
        try:
            yield
        finally:
            self.stepping = False

    def took(self, many: float) -> None:
        """This rank has taken a step over ``many`` samples or the like; if 0, it has taken none."""
        self._counted += many
        self._taken += many > 0

    def back(self) -> None:
        """The interval was left: restore the parameters, buffers and optimizer states with which it began; options of
        the optimizers, such as learning rates, stay."""
        if self._start is not None:
            with torch.no_grad():
                for value, start in zip(self._values(), self._start, strict=True):
                    if value.shape == start.shape:  # another shape is refused elsewhere
                        value.copy_(start)
                for name, before in zip(self._wholes, self._before, strict=True):
                    self._model.get_buffer(name).copy_(before)
            for one, before_steps in self._kept:
                own = one.state_dict()
                one.load_state_dict({**own, "state": before_steps} if "param_groups" in own else before_steps)
            self._kept = []
        self.over()

    def over(self) -> None:
        """End the interval; the parameters stay unchanged."""
        self._start = None

    def forget(self) -> None:
        """Drop all changes on their way, since other parameters were loaded."""
        self.over()
        self.flights.clear()
        if self._ranks.merging is not None:
            self._ranks.merging.forget()

    def fill(self, batch: int, optimizers: list[Any]) -> None:
        """Set this rank's change since the interval of ``batch`` samples began, and its weight.

        optimizers: those of this rank."""
        assert self._start is not None
        self._check_buffers()
        many, counters = len(self._parameters), []
        for name, before in zip(self._wholes, self._before, strict=True):
            now = self._model.get_buffer(name)
            if name in self._counters:
                counters.append(float(now))
            elif not torch.equal(now, before):
                raise PacelineError(
                    f"LocalSGD: buffer {name} holds {now.numel()} whole numbers that a rank's steps change, and "
                    "a merge cannot average whole numbers; keep them in a floating tensor, which is averaged"
                )
        weights = {"samples": self._counted / batch, "steps": self._taken, "ranks": self._taken > 0}
        weight = float(weights[self._merge.by])
        row = [1.0, weight, *self._projection.of(self.base[:many]), learning_rate(optimizers)]
        begun = [*self._begun(), *self.base[many:]]
        self.flats.fill(begun, self._values(), weight, [*row, *counters, *self._frozen.row()])

    @torch.no_grad()
    def send(self, whole: bool) -> None:
        """Send the changes that ``fill`` has set. whole: this rank waits for their sum."""
        own, changes = self.flats.own, list[torch.Tensor]()
        if not whole:
            changes = [change(*both) for both in zip(self._begun(), self._parameters, strict=True)]
            if not self._taken:  # samples without weight may have changed buffers
                self.back()
        assert self._ranks.merging is not None
        summed = partial(_seconds, self._ranks.merging.summing(self._merge.send), own)
        wait = self._aside.submit(summed).result if self._merge.delay else summed
        self.flights.append(Flight(own, wait, changes))

    def take_in(self, step: int, most: int = 0) -> float:
        """Merge changes on their way, until at most ``most`` merges are left. step: the newest ended interval.
        Returns the seconds that the newest sum took; 0 before the first."""
        before = len(self.flights)
        while len(self.flights) > most:
            flight = self.flights.popleft()
            self._seconds = flight.wait()
            self.apply(step - len(self.flights), flight.own)
        if before > len(self.flights) > 0:
            with torch.no_grad():
                changes = zip(*(flight.changes for flight in self.flights), strict=True)
                for parameter, own in zip(self._parameters, changes, strict=True):
                    parameter.sub_(sum(own))
        return self._seconds

    @torch.no_grad()
    def apply(self, step: int, own: list[torch.Tensor]) -> None:
        """Take the outer optimizer's step from the base with the sums ``own`` of interval ``step``."""
        values = self._values()
        changes, table = read(own, values)
        present, weights = table[:, 0] > 0, table[:, 1]
        self._projection.check_alike(step, present, table[:, 2], table[:, 3])
        tail = HEAD + len(self._counters)
        self._frozen.check_alike(step, present, table[:, tail:])
        self._watch_rates(step, table[present, 4])
        whole, parameters = float(weights.sum()), len(self._parameters)
        for number, (value, base, each) in enumerate(zip(values, self.base, changes, strict=True)):
            mean = each.div_(whole) if whole else each.zero_()
            if number < parameters:
                value.copy_(base)
                value.grad = mean.to(value.dtype)
            elif not self.flights:
                value.copy_(base).sub_(mean)
        with self.steps():
            self._outer.step()
        put(self._parameters)
        if self.flights:
            self.base[:parameters] = [p.detach().clone() for p in self._parameters]
            return
        counting = weights > 0 if whole else present
        for name, most in zip(self._counters, table[counting, HEAD:tail].amax(0).tolist(), strict=True):
            self._model.get_buffer(name).fill_(most)

    def state_dict(self) -> dict[str, Any]:
        """The state for a rank that joins: the model at the beginning of the running interval, or now between two."""
        values = [*self._values(), *(self._model.get_buffer(name) for name in self._wholes)]
        began: dict[int, torch.Tensor] = {}
        if self._start is not None:
            began = dict(zip(map(id, values), [*self._start, *self._before], strict=True))
        model = {
            kind: {
                name: began.get(id(value), value.detach() if isinstance(value, torch.Tensor) else value)
                for name, value in values.items()
            }
            for kind, values in whole_state(self._model, keep_vars=True).items()
        }
        return {"model": model, "outer": self._outer.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load the ``state_dict`` of another rank."""
        load_whole_state(self._model, state["model"])
        self._outer.load_state_dict(state["outer"])

    def outer_state(self) -> dict[str, Any]:
        """The outer optimizer's state for a checkpoint, copied, since it may stay in memory; empty if it has none."""
        state = self._outer.state_dict()
        return {**copy.deepcopy(state), "class": type(self._outer).__name__} if state["state"] else {}

    def check_outer(self, state: Any) -> None:
        """Raises PacelineError for an ``outer_state`` with which another class of optimizers would continue."""
        own = type(self._outer).__name__
        if state and state["class"] != own:
            raise PacelineError(
                f"the checkpoint has the state of the outer optimizer {state['class']}, and this run has {own}; "
                'expected the same Merge(outer=): or begin it anew with state["outer"] = {}'
            )

    def load_outer(self, state: Any) -> None:
        """Replace the outer optimizer's state by one of ``outer_state``; its rates stay those chosen now."""
        own = self._outer.state_dict()
        self._outer.load_state_dict({**own, "state": copy.deepcopy(state["state"]) if state else {}})

    def close(self) -> None:
        """End the thread that sums; no merges may follow."""
        self._aside.close()
        if self._ranks.merging is not None and not self.flights:
            self._ranks.merging.close()

    # -- within ----------------------------------------------------------------------------------------------

    def _begun(self) -> list[torch.Tensor]:
        """The parameters from which this rank's change counts. While changes are on their way, these are the results
        of the newest merge: a change that the program has made since, such as a decay of its own, is not part of the
        base, and counts as this rank's if the rank takes steps."""
        assert self._start is not None
        if not (self.flights and self._taken):
            return self._start[: len(self._parameters)]
        changes = zip(*(flight.changes for flight in self.flights), strict=True)
        return [base - sum(each) for base, each in zip(self.base, changes, strict=False)]

    def _values(self) -> list[torch.Tensor]:
        """The values that are merged by their changes: parameters, then floating buffers."""
        return [*self._parameters, *(self._model.get_buffer(name) for name in self._floats)]

    def _check_buffers(self) -> None:
        """Raises PacelineError for buffers of the model's state that are new, or have another shape."""
        before = [*self.base[len(self._parameters) :], *self._before]
        names = [*self._floats, *self._wholes]
        shapes = {name: value.shape for name, value in zip(names, before, strict=True)}
        kept = self._model.state_dict(keep_vars=True)
        for name, now in self._model.named_buffers():
            shape = shapes.get(name)
            if shape is None and name in kept:
                raise PacelineError(
                    f"LocalSGD: buffer {name} has appeared since LocalSGD was made, and no merge would make it the "
                    "same on all ranks; register it before, or with persistent=False if it is not part of the model"
                )
            if shape is not None and shape != now.shape:
                raise PacelineError(
                    f"LocalSGD: buffer {name} had the shape {tuple(shape)} and has {tuple(now.shape)} now, which "
                    "cannot be merged; give it its shape before Pace is made"
                )

    def _watch_rates(self, step: int, rates: torch.Tensor) -> None:
        """Warns, once, if ranks end an interval with different learning rates."""
        if (
            not self._warned
            and self._ranks.members.chief
            and (rates != rates[0]).any()
            and not rates.isnan().any()
        ):
            self._warned = True
            warnings.warn(
                f"ranks came to the merge of interval {step} with learning rates from {float(rates.min()):g} to "
                f"{float(rates.max()):g}: step schedulers once an interval, as in "
                "`if pace.merged:`, since ranks take different numbers of steps",
                RuntimeWarning,
                stacklevel=timing.level(),
            )


def _seconds(summing: Callable[[list[torch.Tensor]], None], own: list[torch.Tensor]) -> float:
    """Sum these tensors over the ranks, and return the seconds that it took."""
    began = time.perf_counter()
    summing(own)
    return time.perf_counter() - began
