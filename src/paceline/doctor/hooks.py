"""Hooks that follow one rank's training loop and measure where each optimizer step's time goes."""

from __future__ import annotations

import sys
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils.rnn import PackedSequence
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.data.dataloader import _BaseDataLoaderIter

from paceline.attach.places import place
from paceline.doctor import watches
from paceline.doctor.phases import HostClock, Phase, Phases, StreamClock
from paceline.torch import timing
from paceline.torch.hooks_of_torch import GradientsOfPass
from paceline.torch.mistakes.choices import chooses
from paceline.torch.mistakes.comparing import mixes
from paceline.torch.mistakes.derivatives import derivable
from paceline.torch.mistakes.loss_ends import nodes_of

PASSES = "backwards", "exchanges"
COUNTS = ("samples", "fetches", "backwards", "exchanges", "elements", "squares", "collecting")
"""Counts of an optimizer step on this rank. samples: those of the batch objects that the forward passes are given, or
else the rows of their tensors; ``drawn_by_step`` has those that the DataLoader drew. fetches, backwards, exchanges:
batches from a DataLoader, backward passes, and those of them that ended in an all-reduce. elements: elements of the
forward passes' first input tensors; squares: the same, times the elements of a row.
collecting: seconds of garbage collections."""


class Feed:
    """The batches of a DataLoader's iterator. sizes: samples of batches that are drawn and not yet fetched. fetched:
    samples of the batches fetched in this step. loader: see ``watches.loader_of``. place: file and line that fetched
    the newest."""

    def __init__(self) -> None:
        self.sizes: deque[int] = deque()
        self.fetched: list[int] = []
        self.loader: dict[str, Any] | None = None
        self.place: tuple[str, int] | None = None


class Hooks:
    """Hooks on a DistributedDataParallel module until ``remove``; they call ``stepped`` after each optimizer step."""

    def __init__(self, model: DistributedDataParallel, stepped: Callable[[], None]) -> None:
        parameters = [p for p in model.parameters() if p.requires_grad]
        device = parameters[0].device if parameters else torch.device("cpu")
        self._model, self._stepped, self._parameters = model, stepped, parameters
        self._ours = {id(p) for p in parameters}
        self._clock = StreamClock() if device.type == "cuda" else HostClock()
        self.phases = Phases(self._clock)
        self.loader: dict[str, Any] | None = None  # the loader of the training: see ``watches.loader_of``
        self.places: dict[str, tuple[str, int]] = {}  # file and line of "fetch", "backward", "step"
        self.others = False  # whether the script steps more than one optimizer
        self.counted = True  # whether the batches of every step know their number of samples
        self.batches: list[tuple[Feed, list[int]]] = []  # of each step: its feed, samples of what it fetched
        self._feeds: Any = weakref.WeakKeyDictionary()  # by a DataLoader's iterator: its ``Feed``
        self._drawing: Any = None  # the iterator that is drawing indices now
        self._newest, self._feeding = Feed(), Feed()  # of the newest batch, and of the newest forward pass
        self._seconds: Any = weakref.WeakSet()  # other DistributedDataParallel modules of the script
        self._stepped_once = False
        self.compares: bool | None = (
            None  # whether the loss compares samples with each other; None before the check
        )
        self._output: torch.Tensor | None = None
        self._certain = True
        self._stepping = False  # whether torch is running the hooks of all optimizers
        self._closed: list[tuple[list[tuple[Any, Phase]], list[float]]] = []
        self._before = Phase.PREPARE  # the phase that a fetch or a move interrupted
        self._waiting = Phase.PREPARE  # the phase that a collective interrupted
        self._forward = self._ready = self._reduced = False
        self._counts: Counter[str] = Counter()
        self._collections = watches.Collections()
        self._optimizers = register_optimizer_step_post_hook(self._on_optimizer)
        self._stop_listening = timing.listen(self._on_wait, lambda: self.phases.enter(self._waiting))
        self._handles: list[Any] = [
            self._collections,
            model.register_forward_pre_hook(self._on_forward, with_kwargs=True),
            model.register_forward_hook(self._on_forwarded),
            GradientsOfPass(parameters, self._on_gradients),
            watches.Watch(DistributedDataParallel, "forward", self._on_another),
            watches.Watch(_BaseDataLoaderIter, "_next_index", self._on_draw, self._on_drawn),
            *watches.fetches(self._on_fetch, self._on_fetched),
            watches.Watch(torch.autograd, "backward", self._on_backward, self._on_backward_end),
            *(watches.moves(self._on_move, self._on_moved) if device.type != "cpu" else []),
        ]

    def remove(self) -> None:
        """Remove all hooks; safe to call twice.

        While torch runs the hooks of all optimizers, in an optimizer's step, this class's own hook there is kept,
        without effect, until the next forward pass: torch raises if a hook is removed during that loop."""
        self._stop_listening()
        handles, self._handles = self._handles, []
        for handle in handles:
            handle.remove()
        if self._stepping:

            def leave(*_: object) -> None:
                self._optimizers.remove()
                soon.remove()

            soon = self._model.register_forward_pre_hook(leave)
        else:
            self._optimizers.remove()

    def steps(self, all_of_them: bool = False) -> list[list[float]]:
        """The steps that ended since the last call, except those whose times the device may not know yet. A step is
        the seconds of each ``Phase``, then ``COUNTS``."""
        count = len(self._closed) - (0 if all_of_them else self._clock.lag)
        steps, self._closed = self._closed[: max(count, 0)], self._closed[max(count, 0) :]
        return [self.phases.seconds(marks) + counts for marks, counts in steps]

    def _on_wait(self, _: str) -> None:
        self._waiting = self.phases.now
        self.phases.enter(Phase.REDUCE)

    def _on_fetch(self, iterator: Any) -> None:
        self.phases.go_on()
        self._before = self.phases.now
        self.phases.enter(Phase.FETCH)
        self._newest = self._feeds.setdefault(iterator, Feed())
        self._newest.loader = self._newest.loader or watches.loader_of(iterator)
        self._newest.place = place(sys._getframe())

    def _on_fetched(self, _: Any) -> None:
        self._counts["fetches"] += 1
        if self._newest.sizes:
            self._newest.fetched.append(self._newest.sizes.popleft())
        self.phases.enter(self._before)

    def _on_draw(self, iterator: Any) -> None:
        self._drawing = iterator

    def _on_drawn(self, indices: Any) -> None:
        iterator, self._drawing = self._drawing, None
        if isinstance(indices, list | tuple):  # else an item of the data set is a batch itself
            self._feeds.setdefault(iterator, Feed()).sizes.append(len(indices))

    def _on_move(self, _: Any) -> None:
        self.phases.go_on()
        # A move within another phase belongs to that phase.
        if self.phases.now in (Phase.PREPARE, Phase.BETWEEN):
            self._before = self.phases.now
            self.phases.enter(Phase.MOVE)

    def _on_moved(self, _: Any) -> None:
        if self.phases.now is Phase.MOVE:
            self.phases.enter(self._before)

    def _on_forward(self, _: Any, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
        # Lightning leaves the wrapper itself in evaluation mode.
        if not (self._model.module.training and torch.is_grad_enabled()):
            return
        self.phases.go_on()
        self.phases.enter(Phase.FORWARD)
        self._forward = True
        samples, certain, rows, elements = counted((arguments, named))
        self._certain &= certain
        passed = {"samples": samples, "elements": elements, "squares": elements**2 // max(rows, 1)}
        if self._counts["backwards"] and self._zeroed():
            # Passes whose gradients the script has zeroed, as of an attack on the inputs, are no part of the step.
            for name in (*PASSES, *passed):
                self._counts[name] = 0
        self._counts.update(passed)
        self._feeding = self._newest
        self.note("fetch", self._newest.place)

    def _zeroed(self) -> bool:
        """Whether the gradients of the step's passes so far are gone."""
        return not any(p.grad is not None and bool(p.grad.any()) for p in self._parameters)

    def _on_forwarded(self, _: Any, __: Any, output: Any) -> None:
        if self.phases.now is Phase.FORWARD:
            if self._stepped_once and self.compares is None:
                self._output = next((part for part in _parts(output) if isinstance(part, torch.Tensor)), None)
            self.phases.enter(Phase.BETWEEN)

    def note(self, what: str, where: tuple[str, int] | None) -> None:
        """Note the script's file and line at which it does ``what``."""
        if where is not None:
            self.places[what] = where

    def _on_backward(self, loss: Any) -> None:
        if self.phases.now is Phase.BETWEEN:
            self.note("backward", place(sys._getframe()))
            if self._output is not None:  # in the second step, which is not measured
                self.compares, self._output = compares(loss, self._output), None
            self.phases.enter(Phase.BACKWARD)

    def _on_backward_end(self, _: Any) -> None:
        # If a parameter got no gradient, no hook has reported the last one.
        if self.phases.now is Phase.BACKWARD:
            self.phases.enter(Phase.PREPARE)

    def _on_gradients(self) -> None:
        if not self._forward:
            return
        self._counts["backwards"] += 1
        if not self._model.require_backward_grad_sync:
            self.phases.enter(Phase.PREPARE)
            return
        self._ready, self._reduced = True, False
        self._counts["exchanges"] += 1
        self.phases.enter(Phase.REDUCE)
        _after_ddp(self._on_reduced)

    def _on_another(self, module: Any) -> None:
        """Count the all-reduce of another DistributedDataParallel module of the script as ``REDUCE``."""

        def gradients() -> None:
            before = self.phases.now
            self.phases.enter(Phase.REDUCE)
            _after_ddp(lambda: self.phases.enter(before))

        if module is not self._model and module not in self._seconds:
            parameters = [p for p in module.parameters() if p.requires_grad]
            self._handles.append(GradientsOfPass(parameters, gradients))
            self._seconds.add(module)

    def _on_reduced(self) -> None:
        if self._ready and not self._reduced:
            self._reduced = True
            self.phases.reduced()

    def _on_optimizer(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        held = (id(p) for group in optimizer.param_groups for p in group["params"])  # also frozen ones
        if not self._ready or self._ours.isdisjoint(held):
            self.others |= self._stepped_once
            return
        self._on_reduced()
        self._stepped_once = True
        self.note("step", place(sys._getframe()))
        self.loader = self._feeding.loader or self.loader
        self.counted &= self._certain
        self.batches.append((self._feeding, self._feeding.fetched))
        counts = [float(self._counts[name]) for name in COUNTS[:-1]]
        self._closed.append((self.phases.close(), [*counts, self._collections.taken()]))
        self._counts.clear()
        self.phases.enter(Phase.PREPARE)
        self._forward = self._ready = False
        self._certain = True
        for feed in (self._feeding, *self._feeds.values()):
            feed.fetched = []
        self._stepping = True
        self._stepped()
        self._stepping = False


def drawn_by_step(batches: list[tuple[Feed, list[int]]]) -> list[int]:
    """Samples of the loader's batches that each step trained on, from those that it fetched.

    An iterator of which the first step fetched more batches than steps usually do fetches ahead, as Accelerate's
    does: each of its steps then trains on batches that were fetched before."""
    usual = int(np.median([len(fetched) for _, fetched in batches if fetched] or [0]))
    waiting: dict[int, tuple[bool, deque[int]]] = {}
    drawn = []
    for feed, fetched in batches:
        ahead, queue = waiting.setdefault(id(feed), (len(fetched) > usual, deque()))
        queue.extend(fetched)
        count = min(usual, len(queue)) if ahead else len(fetched)
        drawn.append(sum(queue.popleft() for _ in range(count)))
    return drawn


def _after_ddp(notify: Callable[[], None]) -> None:
    """Call ``notify`` when DDP has waited for its all-reduce. To be called in a backward pass, when the last gradient
    is ready: DDP queues its callback after the first of the two callbacks here, and before the second."""
    queue = torch.autograd.Variable._execution_engine.queue_callback
    queue(lambda: queue(notify))


def counted(given: Any) -> tuple[int, bool, int, int]:
    """The size of a forward pass's inputs: samples, whether these are certain, rows and elements of the first tensor.

    Only a batch object knows its number of samples. The first dimension of a tensor may be nodes of a graph, steps
    of time, or the channels of an image in a list.
    """
    parts = list(_parts(given))
    tensors = [part for part in parts if isinstance(part, torch.Tensor)]
    rows = [tensor.size(0) for tensor in tensors]
    own = next((part for part in parts if isinstance(part, int)), None)
    return own or sum(rows[:1]), bool(own), *((rows[0], tensors[0].numel()) if rows else (0, 0))


def compares(loss: Any, output: torch.Tensor) -> bool:
    """Whether a loss compares samples with each other, or chooses among them; see ``mixes`` and ``chooses``."""
    if (
        not isinstance(loss, torch.Tensor)
        or not output.requires_grad
        or output._backward_hooks
        or len(output) < 2
    ):
        return False
    samples, between = len(output), set(nodes_of(loss.grad_fn)) - set(nodes_of(output.grad_fn))
    with derivable(between):
        return mixes(loss, [output], [0], samples) or chooses(loss, between, [output], [0], samples)


def _parts(given: Any) -> Iterator[torch.Tensor | int]:
    """The tensors that have dimensions, and a batch object's own number of samples; 0 if that number is unknown."""
    if isinstance(given, torch.Tensor):
        if given.is_nested:
            yield int(given.size(0))
        if given.ndim and given.size(0):
            yield given
        return
    if isinstance(given, PackedSequence):
        yield int(given.batch_sizes[0])
        return
    for name in ("num_graphs", "batch_size"):  # of PyTorch Geometric; of DGL and TensorDict
        size = getattr(given, name, None)
        size = size[0] if isinstance(size, torch.Size) and size else size
        if isinstance(size, int) and size > 0:
            yield size
            return
    if isinstance(given, list) and sum(isinstance(part, torch.Tensor) for part in given) > 1:
        yield 0
    parts = given.values() if isinstance(given, Mapping) else given if isinstance(given, list | tuple) else ()
    for part in parts:
        yield from _parts(part)
