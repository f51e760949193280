"""Loads the samples that this rank claims: nobody knew of them in time for the DataLoader to draw ahead.

Without worker processes they are loaded by the rank itself, as all others are then. With them, processes of their
own load what is claimed while the piece before it runs.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

import numpy as np
import torch
import torch.multiprocessing
from torch.utils.data import DataLoader, IterableDataset, default_collate, get_worker_info

from paceline.rounds import Indices
from paceline.torch.feed.nested import joinable, joined
from paceline.torch.feed.pieces import cut
from paceline.torch.liveness.shutdown import end_with_parent

TAKEN_OVER = (
    "num_workers",
    "worker_init_fn",
    "multiprocessing_context",
    "timeout",
)  # from the user's options


class Fetcher(Protocol):
    """``begin`` (from any thread) with the micro-steps of a claim, then ``next`` for each of them in order."""

    def begin(self, micro_steps: list[Indices]) -> None: ...

    def next(self, indices: Indices) -> Any: ...

    def reset(self) -> None: ...

    def close(self) -> None: ...


class Here:
    """By the rank itself, when it is their turn."""

    def __init__(self, dataset: Any, collate: Callable[[Any], Any]) -> None:
        self._dataset, self._collate = dataset, collate

    def begin(self, micro_steps: list[Indices]) -> None:
        pass

    def next(self, indices: Indices) -> Any:
        return self._collate(_read(self._dataset, indices.tolist()))

    def reset(self) -> None:
        pass

    def close(self) -> None:
        pass


class Beside:
    """By processes beside the DataLoader's, as many and set up alike.

    Under the default collate function a micro-step is divided between them, and joined here.
    """

    def __init__(self, dataset: Any, collate: Callable[[Any], Any], options: Mapping[str, Any]) -> None:
        self._workers = int(options["num_workers"])
        plain = collate is default_collate and joinable(collate([dataset[0]]))
        self._parts = self._workers if plain else 1
        context = options.get("multiprocessing_context") or torch.multiprocessing.get_context()
        if isinstance(context, str):
            context = torch.multiprocessing.get_context(context)
        self._queues = [context.SimpleQueue() for _ in range(self._workers)]
        loader: DataLoader[Any] = DataLoader(
            _Asked(dataset, collate, self._queues),
            batch_size=None,
            collate_fn=as_it_is,
            generator=torch.Generator(),  # of its own: the user's numbers shall not depend on who claims
            **{name: options[name] for name in TAKEN_OVER if name in options},
        )
        self._loaded: Iterator[Any] = iter(loader)
        self._micro_step = 0  # the loader hands its tasks round, and keeps their order
        self._counts: deque[int] = deque()  # parts of each micro-step that has begun
        self._home = weakref.finalize(self, _send_home, self._queues)

    def begin(self, micro_steps: list[Indices]) -> None:
        for micro_step in micro_steps:
            start, parts = 0, cut(len(micro_step), -(-len(micro_step) // self._parts))
            for size in parts:
                self._queues[self._micro_step % self._workers].put(micro_step[start : start + size].tolist())
                self._micro_step += 1
                start += size
            self._counts.append(len(parts))

    def next(self, indices: Indices) -> Any:
        return joined([next(self._loaded) for _ in range(self._counts.popleft())])

    def reset(self) -> None:
        """Forget what was begun and not asked for."""
        while self._counts:
            for _ in range(self._counts.popleft()):
                next(self._loaded)

    def close(self) -> None:
        self._home()
        self._loaded = iter(())  # ends the processes now, see ``BalancedLoader.end``


class _Asked(IterableDataset):
    """In a worker process: what its queue asks for, batch after batch."""

    def __init__(self, dataset: Any, collate: Callable[[Any], Any], queues: list[Any]) -> None:
        self._dataset, self._collate, self._queues = dataset, collate, queues

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        assert info is not None
        end_with_parent()  # which may be killed, and then asks for nothing more
        while (indices := self._queues[info.id].get()) is not None:
            yield self._collate(_read(self._dataset, indices))


def fetcher(dataset: Any, collate: Callable[[Any], Any], options: Mapping[str, Any]) -> Fetcher:
    """What suits the user's DataLoader options."""
    return Beside(dataset, collate, options) if options.get("num_workers") else Here(dataset, collate)


def _read(dataset: Any, indices: list[int]) -> Any:
    whole = getattr(dataset, "__getitems__", None)
    return whole(indices) if whole else [dataset[index] for index in indices]


def as_it_is(batch: Any) -> Any:
    """For those that change nothing about a batch."""
    return batch


def _send_home(queues: list[Any]) -> None:
    for queue in queues:
        queue.put(None)


class Prefetch:
    """What processes load while something else runs. ``next`` gives what is asked for, begun or not."""

    def __init__(self, fetcher: Fetcher) -> None:
        self._fetcher = fetcher
        self._begun: deque[Indices] = deque()

    def begin(self, micro_steps: list[Indices]) -> None:
        """Begin to load each of these, behind what was begun before; from any thread."""
        self._fetcher.begin(micro_steps)
        self._begun.extend(micro_steps)

    def expect(self, micro_steps: list[Indices]) -> None:
        """These come next: begin them, if something else was begun."""
        same = len(micro_steps) == len(self._begun) and all(map(np.array_equal, micro_steps, self._begun))
        if not same:
            self.reset()
            self.begin(micro_steps)

    def comes(self, micro_step: Indices) -> bool:
        """Whether this is what was begun first."""
        return bool(self._begun) and np.array_equal(self._begun[0], micro_step)

    def next(self, micro_step: Indices) -> Any:
        """A batch of these samples."""
        if not self.comes(micro_step):
            self.reset()
            self.begin([micro_step])
        self._begun.popleft()
        return self._fetcher.next(micro_step)

    def reset(self) -> None:
        """Forget what was begun."""
        self._begun.clear()
        self._fetcher.reset()

    def close(self) -> None:
        """No more samples."""
        self._fetcher.close()
