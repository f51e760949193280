"""Notices what DistributedDataParallel has no hook for: batches being fetched, tensors being moved, backward passes.

Each watch replaces one method by one that calls it and tells when it began and ended; ``remove`` puts the method
back. Only the thread that made the watch counts: a loader's own threads fetch and move beside the training.
"""

from __future__ import annotations

import functools
import gc
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.data import default_collate, default_convert
from torch.utils.data.dataloader import _BaseDataLoaderIter, _DatasetKind

SAMPLERS = ("SequentialSampler", "RandomSampler", "DistributedSampler", "SeedableRandomSampler")
"""Of torch and Accelerate, each sample once an epoch."""

Told = Callable[[Any], None]
"""Called with the object whose method it is, or behind the call with what it returned."""


class Watch:
    """Tells of the calls of one method, nested ones left out.

    begins, ends: called around each call that ``counts``.
    """

    def __init__(
        self,
        owner: Any,
        name: str,
        begins: Told,
        ends: Told | None = None,
        counts: Callable[..., bool] | None = None,
    ) -> None:
        self._owner, self._name, self._inherited = owner, name, name not in vars(owner)
        method = self._method = getattr(owner, name)
        thread, inside = threading.get_ident(), False

        @functools.wraps(method)
        def watched(*arguments: Any, **named: Any) -> Any:
            nonlocal inside
            if (
                inside
                or self._removed
                or threading.get_ident() != thread
                or (counts is not None and not counts(*arguments, **named))
            ):
                return method(*arguments, **named)
            subject = arguments[0] if arguments else None
            inside, returned = True, None
            begins(subject)
            try:
                returned = method(*arguments, **named)
                return returned
            finally:
                inside = False
                if ends is not None:
                    ends(returned)

        self._watched, self._removed = watched, False
        setattr(owner, name, watched)

    def remove(self) -> None:
        """Put the method back, unless somebody else has replaced it since; tell nothing more in either case."""
        self._removed = True
        if vars(self._owner).get(self._name) is self._watched:
            if self._inherited:
                delattr(self._owner, self._name)
            else:
                setattr(self._owner, self._name, self._method)


class Collections:
    """Python's garbage collections in the thread that made it, until ``remove``."""

    def __init__(self) -> None:
        self._thread, self._began, self._seconds = threading.get_ident(), 0.0, 0.0
        gc.callbacks.append(self._told)

    def taken(self) -> float:
        """Seconds since this was asked last."""
        seconds, self._seconds = self._seconds, 0.0
        return seconds

    def remove(self) -> None:
        """Watch no more."""
        if self._told in gc.callbacks:
            gc.callbacks.remove(self._told)

    def _told(self, phase: str, _: dict[str, int]) -> None:
        if threading.get_ident() != self._thread:
            return
        if phase == "start":
            self._began = time.perf_counter()
        else:
            self._seconds += time.perf_counter() - self._began


def fetches(begins: Told, ends: Told) -> list[Watch]:
    """Watches of every DataLoader's iterator, subclasses with a ``__next__`` of their own included."""
    kinds = [kind for kind in _family(_BaseDataLoaderIter) if "__next__" in vars(kind)]
    return [Watch(kind, "__next__", begins, ends) for kind in kinds]


def draws(begins: Told, ends: Told) -> Watch:
    """The watch of DataLoaders that take the indices of a batch, perhaps long before it is there."""
    return Watch(_BaseDataLoaderIter, "_next_index", begins, ends)


def moves(begins: Told, ends: Told) -> list[Watch]:
    """Watches of tensors that are copied to a device."""
    return [
        Watch(torch.Tensor, "to", begins, ends, _to_another_device),
        Watch(torch.Tensor, "cuda", begins, ends, lambda tensor, *_, **__: not tensor.is_cuda),
    ]


def backwards(begins: Told, ends: Told) -> list[Watch]:
    """The watch of backward passes, which all go through this function."""
    return [Watch(torch.autograd, "backward", begins, ends)]


def loader_of(iterator: Any) -> dict[str, Any]:
    """What a DataLoader's iterator tells of its loader: its processes, whether it reads a stream, and as text the
    options that ``pace.loader`` is given in its place; None if its sampler is one that balancing has not."""
    sampler = iterator._index_sampler
    while inner := getattr(sampler, "batch_sampler", None) or getattr(sampler, "sampler", None):
        sampler = inner
    kind = type(sampler).__name__
    options = [] if getattr(sampler, "shuffle", kind != "SequentialSampler") else ["shuffle=False"]
    options += ["drop_last=True"] if iterator._drop_last else []
    options += ["num_workers={loader}.num_workers"] if iterator._num_workers else []
    if getattr(iterator, "_worker_init_fn", None) is not None:
        options.append("worker_init_fn={loader}.worker_init_fn")
    options += ["pin_memory={loader}.pin_memory"] if iterator._pin_memory else []
    own = iterator._collate_fn not in (default_collate, default_convert)
    options += ["collate_fn={loader}.collate_fn"] if own else []
    known = kind in SAMPLERS and not getattr(sampler, "replacement", False)
    return {
        "processes": int(iterator._num_workers),
        "stream": iterator._dataset_kind == _DatasetKind.Iterable,
        "options": options if known else None,
    }


def _family(kind: type) -> Iterator[type]:
    yield kind
    children: list[type] = kind.__subclasses__()
    for child in children:
        yield from _family(child)


def _to_another_device(tensor: torch.Tensor, *arguments: Any, **named: Any) -> bool:
    """Whether ``tensor.to(...)`` with these arguments copies from the host, or another device, to a device."""
    target = named.get("device", named.get("other", arguments[0] if arguments else None))
    if isinstance(target, torch.Tensor):
        target = target.device
    if isinstance(target, int) and not isinstance(target, bool):
        return not tensor.is_cuda
    kind = target.partition(":")[0] if isinstance(target, str) else getattr(target, "type", None)
    return kind not in (None, "cpu", tensor.device.type)
