"""Follows one rank's training loop from hooks and tells where each optimizer step's time went."""

from __future__ import annotations

import sys
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils.rnn import PackedSequence
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.data.dataloader import _BaseDataLoaderIter

from paceline.doctor import watches
from paceline.doctor.phases import HostClock, Phase, Phases, StreamClock
from paceline.doctor.watches import place
from paceline.torch import waits

COUNTS = ("samples", "fetches", "backwards", "exchanges", "elements", "squares", "collecting")
"""What is counted in an optimizer step on this rank. samples: those that the DataLoader drew, or else by what the
forward passes were given. fetches, backwards, exchanges: batches from a DataLoader, backward passes, and those among
them that ended in an all-reduce. elements: of the first tensors that the forward passes were given; squares: the same
times how many each row has. collecting: seconds of garbage collections."""


class Feed:
    """What an iterator of a DataLoader gives. sizes: samples of the batches on their way. drawn: those fetched in
    this step. told: see ``watches.loader_of``. place: file and line of the script that fetched the newest batch."""

    def __init__(self) -> None:
        self.sizes: deque[int] = deque()
        self.drawn = 0
        self.told: dict[str, Any] | None = None
        self.place: tuple[str, int] | None = None


class Hooks:
    """On a DistributedDataParallel module, until ``remove``; ``stepped`` is called after each optimizer step."""

    def __init__(self, model: DistributedDataParallel, stepped: Callable[[], None]) -> None:
        parameters = [p for p in model.parameters() if p.requires_grad]
        device = parameters[0].device if parameters else torch.device("cpu")
        self._model, self._stepped = model, stepped
        self._ours = {id(p) for p in parameters}
        self._clock = StreamClock() if device.type == "cuda" else HostClock()
        self.phases = Phases(self._clock)
        self.loader: dict[str, Any] | None = None  # what feeds the training: see ``watches.loader_of``
        # Of "fetch", "backward", "step": the script's file and line.
        self.places: dict[str, tuple[str, int]] = {}
        self.others = False  # whether the script steps more than one optimizer
        self.sure = True  # whether the samples of every step could be counted
        self._feeds: Any = weakref.WeakKeyDictionary()  # a DataLoader's iterator: its ``Feed``
        self._drawing: Any = None  # the iterator that takes indices just now
        self._newest, self._feeding = Feed(), Feed()  # of the newest batch, and of the newest forward pass
        self._seconds: Any = weakref.WeakSet()  # other modules of the script
        self._stepped_once = False
        self.compares: bool | None = None  # whether the loss compares samples with each other; looked at once
        self._output: torch.Tensor | None = None
        self._certain = True
        self._stepping = False  # torch is going through the hooks of all optimizers
        self._closed: list[tuple[list[tuple[Any, Phase]], list[float]]] = []
        self._before = Phase.PREPARE  # the phase that a fetch or a move interrupted
        self._waiting = Phase.PREPARE  # the phase that a collective interrupted
        self._forward = self._ready = self._reduced = False
        self._counts: Counter[str] = Counter()
        self._collections = watches.Collections()
        self._optimizers = register_optimizer_step_post_hook(self._on_optimizer)
        self._hear_no_more = waits.listen(self._on_wait, lambda: self.phases.enter(self._waiting))
        self._handles: list[Any] = [
            self._collections,
            model.register_forward_pre_hook(self._on_forward, with_kwargs=True),
            model.register_forward_hook(self._on_forwarded),
            torch.autograd.graph.register_multi_grad_hook(parameters, self._on_gradients),
            watches.Watch(DistributedDataParallel, "forward", self._on_another),
            watches.Watch(_BaseDataLoaderIter, "_next_index", self._on_draw, self._on_drawn),
            *watches.fetches(self._on_fetch, self._on_fetched),
            watches.Watch(torch.autograd, "backward", self._on_backward, self._on_backward_end),
            *(watches.moves(self._on_move, self._on_moved) if device.type != "cpu" else []),
        ]

    def remove(self) -> None:
        """Take all hooks away; safe to call twice.

        Within an optimizer's step, while torch goes through the hooks of all optimizers, ours among them stays there
        without effect until the next forward pass: taken away at once, it would end the training if others follow."""
        self._hear_no_more()
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
        """The steps that ended and were not told of yet, but for those whose times the device still owes: of each the
        seconds of each ``Phase``, then ``COUNTS``."""
        count = len(self._closed) - (0 if all_of_them else self._clock.lag)
        told, self._closed = self._closed[: max(count, 0)], self._closed[max(count, 0) :]
        return [self.phases.seconds(marks) + counts for marks, counts in told]

    def _on_wait(self, _: str) -> None:
        self._waiting = self.phases.now
        self.phases.enter(Phase.REDUCE)

    def _on_fetch(self, iterator: Any) -> None:
        self.phases.go_on()
        self._before = self.phases.now
        self.phases.enter(Phase.FETCH)
        self._newest = self._feeds.setdefault(iterator, Feed())
        self._newest.told = self._newest.told or watches.loader_of(iterator)
        self._newest.place = place(sys._getframe())

    def _on_fetched(self, _: Any) -> None:
        self._counts["fetches"] += 1
        if self._newest.sizes:
            self._newest.drawn += self._newest.sizes.popleft()
        self.phases.enter(self._before)

    def _on_draw(self, iterator: Any) -> None:
        self._drawing = iterator

    def _on_drawn(self, indices: Any) -> None:
        iterator, self._drawing = self._drawing, None
        if isinstance(indices, list | tuple):  # else an item of the data set is a batch itself
            self._feeds.setdefault(iterator, Feed()).sizes.append(len(indices))

    def _on_move(self, _: Any) -> None:
        self.phases.go_on()
        # Elsewhere a move belongs to what it happens in.
        if self.phases.now in (Phase.PREPARE, Phase.BETWEEN):
            self._before = self.phases.now
            self.phases.enter(Phase.MOVE)

    def _on_moved(self, _: Any) -> None:
        if self.phases.now is Phase.MOVE:
            self.phases.enter(self._before)

    def _on_forward(self, _: Any, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
        # Lightning leaves the wrapper itself in evaluation's mode.
        if not (self._model.module.training and torch.is_grad_enabled()):
            return
        self.phases.go_on()
        self.phases.enter(Phase.FORWARD)
        self._forward = True
        samples, certain, rows, elements = counted((arguments, named))
        self._certain &= certain
        self._counts.update(samples=samples, elements=elements, squares=elements**2 // max(rows, 1))
        self._feeding = self._newest
        self.note("fetch", self._newest.place)

    def _on_forwarded(self, _: Any, __: Any, output: Any) -> None:
        if self.phases.now is Phase.FORWARD:
            if self._stepped_once and self.compares is None:
                self._output = next((part for part in _parts(output) if isinstance(part, torch.Tensor)), None)
            self.phases.enter(Phase.BETWEEN)

    def note(self, what: str, where: tuple[str, int] | None) -> None:
        """That the script does it there."""
        if where is not None:
            self.places[what] = where

    def _on_backward(self, loss: Any) -> None:
        if self.phases.now is Phase.BETWEEN:
            self.note("backward", place(sys._getframe()))
            if self._output is not None:  # in the second step, which is not measured
                self.compares, self._output = compares(loss, self._output), None
            self.phases.enter(Phase.BACKWARD)

    def _on_backward_end(self, _: Any) -> None:
        # If a parameter had no part in it, no hook told of the last gradient.
        if self.phases.now is Phase.BACKWARD:
            self.phases.enter(Phase.PREPARE)

    def _on_gradients(self, _: object) -> None:
        if not self._forward:
            return
        self._counts["backwards"] += 1
        if not self._model.require_backward_grad_sync:
            self.phases.enter(Phase.PREPARE)
            return
        self._ready, self._reduced = True, False
        self._counts["exchanges"] += 1
        self.phases.enter(Phase.REDUCE)
        _behind_ddp(self._on_reduced)

    def _on_another(self, module: Any) -> None:
        """The script trains a second DistributedDataParallel module; what its backward pass waits is no work."""

        def gradients(_: object) -> None:
            before = self.phases.now
            self.phases.enter(Phase.REDUCE)
            _behind_ddp(lambda: self.phases.enter(before))

        if module is not self._model and module not in self._seconds:
            parameters = [p for p in module.parameters() if p.requires_grad]
            self._handles.append(torch.autograd.graph.register_multi_grad_hook(parameters, gradients))
            self._seconds.add(module)

    def _on_reduced(self) -> None:
        if self._ready and not self._reduced:
            self._reduced = True
            self.phases.reduced()

    def _on_optimizer(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        held = (id(p) for group in optimizer.param_groups for p in group["params"])  # frozen ones, too
        if not self._ready or self._ours.isdisjoint(held):
            self.others |= self._stepped_once
            return
        self._on_reduced()
        self._stepped_once = True
        self.note("step", place(sys._getframe()))
        # What a loader draws is what balancing divides, whatever a batch looks like and how often it is used.
        drawn = self._feeding.drawn
        self.loader = self._feeding.told or self.loader
        self.sure &= self._certain or bool(drawn)
        self._counts["samples"] = drawn or self._counts["samples"]
        counts = [float(self._counts[name]) for name in COUNTS[:-1]]
        self._closed.append((self.phases.close(), [*counts, self._collections.taken()]))
        self._counts.clear()
        self.phases.enter(Phase.PREPARE)
        self._forward = self._ready = False
        self._certain = True
        for feed in (self._feeding, *self._feeds.values()):
            feed.drawn = 0
        self._stepping = True
        self._stepped()
        self._stepping = False


def _behind_ddp(told: Callable[[], None]) -> None:
    """Within a backward pass whose last gradient is ready: call ``told`` when DDP has waited for its all-reduce, in a
    callback that it queues after the first of these."""
    queue = torch.autograd.Variable._execution_engine.queue_callback
    queue(lambda: queue(told))


def counted(given: Any) -> tuple[int, bool, int, int]:
    """What a forward pass is given: its samples, whether that is certain, rows and elements of the first tensor.

    A batch may tell its samples itself. Otherwise they are the first dimension of the first tensor, which is certain
    if all tensors have it, and none is in a list: nodes and edges of graphs have others, and images in a list none.
    """
    parts = list(_parts(given))
    tensors = [part for part in parts if isinstance(part, torch.Tensor)]
    rows = [tensor.size(0) for tensor in tensors]
    told = next((part for part in parts if isinstance(part, int)), None)
    certain = len(set(rows)) <= 1 if told is None else told > 0
    return told or sum(rows[:1]), certain, *((rows[0], tensors[0].numel()) if rows else (0, 0))


def compares(loss: Any, output: torch.Tensor) -> bool:
    """Whether a loss compares samples with each other: whether its slope by one half of a batch's outputs, which come
    first, depends on the other half. A mean or a sum of a loss of each sample has no such second derivative."""
    half = len(output) // 2
    if not isinstance(loss, torch.Tensor) or not output.requires_grad or output._backward_hooks or not half:
        return False
    try:
        (slope,) = torch.autograd.grad(loss, output, create_graph=True)
        ramp = torch.linspace(1, 2, slope[:half].numel(), dtype=slope.dtype, device=slope.device)
        (cross,) = torch.autograd.grad(slope[:half].flatten() @ ramp, output, retain_graph=True)
    except RuntimeError:  # it has no second derivative, or does not go through this output
        return False
    cross = cross.nan_to_num().abs()  # a distance of nothing has no derivative
    return bool(cross[half:].max() > 1e-5 * cross.max())


def _parts(given: Any) -> Iterator[torch.Tensor | int]:
    """The tensors that have dimensions, and what a batch tells of its number of samples; 0: nobody knows it."""
    if isinstance(given, torch.Tensor):
        if given.ndim and given.size(0):
            yield given
        return
    if isinstance(given, PackedSequence):
        yield int(given.batch_sizes[0])
        return
    for name in ("num_graphs", "batch_size"):  # of PyTorch Geometric; of DGL and TensorDict
        told = getattr(given, name, None)
        told = told[0] if isinstance(told, torch.Size) and told else told
        if isinstance(told, int) and told > 0:
            yield told
            return
    if isinstance(given, list) and sum(isinstance(part, torch.Tensor) for part in given) > 1:
        yield 0
    parts = given.values() if isinstance(given, Mapping) else given if isinstance(given, list | tuple) else ()
    for part in parts:
        yield from _parts(part)
