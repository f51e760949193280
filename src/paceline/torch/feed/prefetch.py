"""Loads the samples that this rank claims: they are known too late for the DataLoader to prefetch them.

Without worker processes the rank itself loads them, as it loads all others then. With them, separate processes load
what is claimed while the piece before it runs.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
import torch.multiprocessing
from torch.utils.data import DataLoader, IterableDataset, default_collate, get_worker_info

from paceline.rounds import Indices
from paceline.torch.batches import joinable, joined
from paceline.torch.feed.pieces import cut
from paceline.torch.liveness.shutdown import end_with_parent

# The user's DataLoader options that these processes use, too.
TAKEN_OVER = ("num_workers", "worker_init_fn", "multiprocessing_context", "timeout")
FACTOR = 2  # parts that a process loads ahead, unless ``prefetch_factor`` says it; also torch's default


class Prefetch:
    """Loads batches beside the DataLoader. ``next`` gives a batch, whether its loading has begun or not.

    With ``num_workers`` in the options, as many processes load what has begun, set up like the DataLoader's; under
    the default collate function a micro-step is divided between them, and joined here. Without it the rank itself
    loads each batch in ``next``. draws: gives the seed of these processes.
    """

    def __init__(
        self, dataset: Any, collate: Callable[[Any], Any], options: Mapping[str, Any], draws: torch.Generator
    ) -> None:
        self._dataset, self._collate = dataset, collate
        self._workers = int(options.get("num_workers") or 0)
        self._begun: deque[tuple[Indices, int]] = deque()  # micro-steps, and the parts that each is loaded in
        self._queues: list[Any] = []
        # A process reads its queue only while the DataLoader owes this rank a part: no more are requested. A thread
        # of the queue writes the indices: a pipe may hold less than those of one part.
        factor = options.get("prefetch_factor")
        self._most = self._workers * (FACTOR if factor is None else int(factor))
        self._later: deque[list[int]] = deque()  # parts that were begun and are not requested yet
        self._requested = 0  # parts that were requested and are not received yet
        self._loaded: Iterator[Any] = iter(())
        if self._workers:
            plain = collate is default_collate and joinable(collate([dataset[0]]))
            self._parts = self._workers if plain else 1
            context = options.get("multiprocessing_context") or torch.multiprocessing.get_context()
            if isinstance(context, str):
                context = torch.multiprocessing.get_context(context)
            self._queues += [context.Queue() for _ in range(self._workers)]
            for queue in self._queues:
                queue.cancel_join_thread()  # the program ends though a process that was killed reads nothing more
            loader: DataLoader[Any] = DataLoader(
                _Requested(dataset, collate, self._queues),
                batch_size=None,
                collate_fn=as_it_is,
                prefetch_factor=self._most // self._workers,
                generator=draws,  # the user's random numbers must not depend on claims
                **{name: options[name] for name in TAKEN_OVER if name in options},
            )
            self._loaded = iter(loader)
        self._task = 0  # number of the next part: the loader takes parts from its processes in turn, in order
        self._end = weakref.finalize(self, _end_processes, self._queues)
        # The processes end with this one, which can start no thread of a queue by then.
        self._end.atexit = False

    def begin(self, micro_steps: list[Indices]) -> None:
        """Begin to load each of these, after what was begun before; from any thread."""
        for micro_step in micro_steps:
            start, many = 0, len(micro_step)
            parts = cut(many, -(-many // self._parts)) if self._workers else []
            for size in parts:
                self._later.append(micro_step[start : start + size].tolist())
                start += size
            self._begun.append((micro_step, len(parts)))
        self._request()

    def expect(self, micro_steps: list[Indices]) -> None:
        """These come next: begin them, unless exactly these were begun."""
        begun = [micro_step for micro_step, _ in self._begun]
        if len(micro_steps) != len(begun) or not all(map(np.array_equal, micro_steps, begun)):
            self.reset()
            self.begin(micro_steps)

    def comes(self, micro_step: Indices) -> bool:
        """Whether this is the first of the micro-steps that were begun."""
        return bool(self._begun) and np.array_equal(self._begun[0][0], micro_step)

    def next(self, micro_step: Indices) -> Any:
        """A batch of these samples."""
        if not self.comes(micro_step):
            self.reset()
            self.begin([micro_step])
        _, parts = self._begun.popleft()
        if not self._workers:
            return loaded(self._dataset, self._collate, micro_step.tolist())
        return joined([self._part() for _ in range(parts)])

    def reset(self) -> None:
        """Discard what was begun and not taken by ``next``."""
        self._begun.clear()
        self._later.clear()
        while self._requested:
            self._part()

    def close(self) -> None:
        """End the processes."""
        self._end()
        self._loaded = iter(())  # ends the processes now, see ``BalancedLoader.end``

    def _request(self) -> None:
        """Request the next parts, as many as the processes may load ahead."""
        while self._later and self._requested < self._most:
            self._queues[self._task % self._workers].put(self._later.popleft())
            self._task += 1
            self._requested += 1

    def _part(self) -> Any:
        """Wait for the next part that was requested."""
        self._requested -= 1
        part = next(self._loaded)
        self._request()
        return part


class _Requested(IterableDataset):
    """In a worker process: the batches that its queue requests, one after the other."""

    def __init__(self, dataset: Any, collate: Callable[[Any], Any], queues: list[Any]) -> None:
        self._dataset, self._collate, self._queues = dataset, collate, queues

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        assert info is not None
        end_with_parent()  # a parent that is killed sends no end through the queue
        while (indices := self._queues[info.id].get()) is not None:
            yield loaded(self._dataset, self._collate, indices)


def draws(*numbers: int) -> torch.Generator:
    """A generator for the seeds of a DataLoader's processes, seeded by these numbers. Without it, ranks that were
    seeded alike would draw the same random numbers for their augmentations."""
    (state,) = np.random.SeedSequence(numbers).generate_state(1, np.uint64).tolist()
    return torch.Generator().manual_seed(state >> 1)


def loaded(dataset: Any, collate: Callable[[Any], Any], indices: list[int]) -> Any:
    """A batch of these samples."""
    whole = getattr(dataset, "__getitems__", None)
    return collate(whole(indices) if whole else [dataset[index] for index in indices])


def as_it_is(batch: Any) -> Any:
    """The batch, unchanged: a collate function for items that are batches already."""
    return batch


def _end_processes(queues: list[Any]) -> None:
    for queue in queues:
        queue.put(None)
        queue.close()
