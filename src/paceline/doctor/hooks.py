"""Follows one rank's training loop from hooks and tells where each optimizer step's time went."""

from __future__ import annotations

import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils.rnn import PackedSequence
from torch.optim.optimizer import register_optimizer_step_post_hook

from paceline.doctor import watches
from paceline.doctor.clock import clock
from paceline.doctor.phases import Phase, Phases

MOVABLE = (Phase.PREPARE, Phase.BETWEEN)  # elsewhere a move belongs to what it happens in


class Step(NamedTuple):
    """What one optimizer step was on this rank. seconds: of each ``Phase``. samples: those that the DataLoader drew,
    or else by what the forward passes were given. fetches, backwards, exchanges: batches from a DataLoader, backward
    passes, and those among them that ended in an all-reduce. elements: of the first tensors that the forward passes
    were given; squares: the same times how many each row has. collecting: seconds of garbage collections."""

    seconds: list[float]
    samples: int
    fetches: int
    backwards: int
    exchanges: int
    elements: int
    squares: int
    collecting: float


class Hooks:
    """On a DistributedDataParallel module, until ``remove``; ``stepped`` is called after each optimizer step."""

    def __init__(self, model: DistributedDataParallel, stepped: Callable[[], None]) -> None:
        parameters = [p for p in model.parameters() if p.requires_grad]
        device = parameters[0].device if parameters else torch.device("cpu")
        self._model, self._stepped = model, stepped
        self._ours = {id(p) for p in parameters}
        self._clock = clock(device)
        self.phases = Phases(self._clock)
        self.loader: dict[str, Any] | None = None  # what feeds the training: see ``watches.loader_of``
        self.sure = True  # whether the samples of every step could be counted
        self._newest: dict[str, Any] | None = None
        self._indices: Any = weakref.WeakKeyDictionary()  # iterator: sizes of batches that it will yet give
        self._iterator: Any = None  # that is asked for something now
        self._drawn: Counter[int] = Counter()  # data set: samples fetched in this step
        self._asked = self._feeding = 0  # data sets: of the newest batch, of the newest forward pass
        self._certain = True
        self._stepping = False  # torch is going through the hooks of all optimizers
        self._closed: list[tuple[list[tuple[Any, Phase]], tuple[Any, ...]]] = []
        self._before = Phase.PREPARE  # the phase that a fetch or a move interrupted
        self._waiting = Phase.PREPARE  # the phase that a collective interrupted
        self._forward = self._ready = self._reduced = False
        self._samples = self._fetched = self._backwards = self._exchanges = self._elements = self._squares = 0
        self._collections = watches.Collections()
        self._optimizers = register_optimizer_step_post_hook(self._on_optimizer)
        self._handles: list[Any] = [
            self._collections,
            model.register_forward_pre_hook(self._on_forward, with_kwargs=True),
            model.register_forward_hook(self._on_forwarded),
            torch.autograd.graph.register_multi_grad_hook(parameters, self._on_gradients),
            watches.Waits(self._on_wait, self._on_waited),
            watches.draws(self._on_draw, self._on_drawn),
            *watches.fetches(self._on_fetch, self._on_fetched),
            *watches.backwards(self._on_backward, self._on_backward_end),
            *(watches.moves(self._on_move, self._on_moved) if device.type != "cpu" else []),
        ]

    @property
    def attached(self) -> bool:
        """Whether the hooks are in place."""
        return bool(self._handles)

    def remove(self) -> None:
        """Take all hooks away; safe to call twice.

        Within an optimizer's step, while torch goes through the hooks of all optimizers, ours among them stays there
        without effect until the next forward pass: taken away at once, it would end the training if others follow."""
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

    def steps(self, all_of_them: bool = False) -> list[Step]:
        """The steps that ended and were not told of yet, but for those whose times the device still owes."""
        count = len(self._closed) - (0 if all_of_them else self._clock.lag)
        told, self._closed = self._closed[: max(count, 0)], self._closed[max(count, 0) :]
        return [Step(self.phases.seconds(marks), *counts) for marks, counts in told]

    def _trains(self) -> bool:
        return self._model.training and torch.is_grad_enabled()

    def _on_wait(self, _: str) -> None:
        self._waiting = self.phases.now
        self.phases.enter(Phase.REDUCE)

    def _on_waited(self) -> None:
        self.phases.enter(self._waiting)

    def _on_fetch(self, iterator: Any) -> None:
        self.phases.go_on()
        self._before = self.phases.now
        self.phases.enter(Phase.FETCH)
        self._newest, self._asked, self._iterator = (
            watches.loader_of(iterator),
            id(iterator._dataset),
            iterator,
        )

    def _on_fetched(self, _: Any) -> None:
        self._fetched += 1
        if sizes := self._indices.get(self._iterator):
            self._drawn[self._asked] += sizes.popleft()
        self._iterator = None  # it has processes, perhaps, which end with it
        self.phases.enter(self._before)

    def _on_draw(self, iterator: Any) -> None:
        self._drawing = iterator

    def _on_drawn(self, indices: Any) -> None:
        iterator, self._drawing = self._drawing, None
        if isinstance(indices, list | tuple):  # else an item of the data set is a batch itself
            self._indices.setdefault(iterator, deque()).append(len(indices))

    def _on_move(self, _: Any) -> None:
        self.phases.go_on()
        if self.phases.now in MOVABLE:
            self._before = self.phases.now
            self.phases.enter(Phase.MOVE)

    def _on_moved(self, _: Any) -> None:
        if self.phases.now is Phase.MOVE:
            self.phases.enter(self._before)

    def _on_forward(self, _: Any, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
        if not self._trains():
            return
        self.phases.go_on()
        self.phases.enter(Phase.FORWARD)
        self._forward = True
        samples, certain, rows, elements = counted((arguments, named))
        self._samples += samples
        self._certain &= certain
        self._elements += elements
        self._squares += elements**2 // max(rows, 1)
        self.loader, self._feeding = self._newest or self.loader, self._asked

    def _on_forwarded(self, *_: Any) -> None:
        if self.phases.now is Phase.FORWARD:
            self.phases.enter(Phase.BETWEEN)

    def _on_backward(self, _: Any) -> None:
        if self.phases.now is Phase.BETWEEN:
            self.phases.enter(Phase.BACKWARD)

    def _on_backward_end(self, _: Any) -> None:
        if (
            self.phases.now is Phase.BACKWARD
        ):  # a parameter had no part in it, so no hook told of the last gradient
            self.phases.enter(Phase.PREPARE)

    def _on_gradients(self, _: object) -> None:
        if not self._forward:
            return
        self._backwards += 1
        if not self._model.require_backward_grad_sync:
            self.phases.enter(Phase.PREPARE)
            return
        self._ready, self._reduced = True, False
        self._exchanges += 1
        self.phases.enter(Phase.REDUCE)
        # DDP waits for its all-reduce in a callback that it queues after this one; so comes ours behind it.
        queue = torch.autograd.Variable._execution_engine.queue_callback
        queue(lambda: queue(self._on_reduced))

    def _on_reduced(self) -> None:
        if self._ready and not self._reduced:
            self._reduced = True
            self.phases.reduced()

    def _on_optimizer(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        held = (id(p) for group in optimizer.param_groups for p in group["params"])  # frozen ones, too
        if not self._ready or self._ours.isdisjoint(held):
            return
        self._on_reduced()
        # What a loader draws is what balancing divides, whatever a batch looks like and how often it is used.
        drawn = self._drawn[self._feeding]
        self.sure &= self._certain or bool(drawn)
        counts = (
            *(drawn or self._samples, self._fetched, self._backwards, self._exchanges),
            *(self._elements, self._squares, self._collections.taken()),
        )
        self._closed.append((self.phases.close(), counts))
        self.phases.enter(Phase.PREPARE)
        self._forward = self._ready = False
        self._certain = True
        self._drawn.clear()
        self._samples = self._fetched = self._backwards = self._exchanges = self._elements = self._squares = 0
        self._stepping = True
        self._stepped()
        self._stepping = False


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
    for part in (
        given.values() if isinstance(given, Mapping) else given if isinstance(given, list | tuple) else ()
    ):
        yield from _parts(part)
