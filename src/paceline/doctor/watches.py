"""Watches for events that DistributedDataParallel has no hook for (batches being fetched, tensors being moved,
backward passes), and a sampler of the script's lines that take a rank's own time.

Each watch replaces one method by a wrapper that reports when the method begins and ends; ``remove`` restores the
method. Only calls in the thread that made the watch count, because a loader's own threads also fetch and move.

The sampler is a thread that reads the training thread's stack about fifty times a second and counts the innermost
line that is in one of the user's files. It never stops the training thread, and it uses its own random generator.
"""

from __future__ import annotations

import functools
import gc
import linecache
import os
import random
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.data import default_collate, default_convert
from torch.utils.data.dataloader import _BaseDataLoaderIter, _DatasetKind

from paceline.attach.places import place
from paceline.doctor.phases import Phase
from paceline.torch.feed.pieces import order_of

Notify = Callable[[Any], None]
"""A callback that gets the object whose method begins, or the value that the method returned."""


class Watch:
    """Reports the calls of one method, except nested ones. begins, ends: callbacks before and after each call for
    which ``counts`` is true."""

    def __init__(
        self,
        owner: Any,
        name: str,
        begins: Notify,
        ends: Notify | None = None,
        counts: Callable[..., bool] | None = None,
    ) -> None:
        self._owner, self._name, self._inherited = owner, name, name not in vars(owner)
        method = self._method = getattr(owner, name)
        thread, inside = threading.get_ident(), False

        @functools.wraps(method)
        def watched(*arguments: Any, **named: Any) -> Any:
            nonlocal inside
            ours = not (inside or self._removed) and threading.get_ident() == thread
            if not ours or (counts is not None and not counts(*arguments, **named)):
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
        """Restore the method, unless other code has replaced it since; report nothing more in either case."""
        self._removed = True
        if vars(self._owner).get(self._name) is self._watched:
            if self._inherited:
                delattr(self._owner, self._name)
            else:
                setattr(self._owner, self._name, self._method)


class Collections:
    """Measures Python's garbage collections in the thread that made this object, until ``remove``."""

    def __init__(self) -> None:
        self._thread, self._began, self._seconds = threading.get_ident(), 0.0, 0.0
        gc.callbacks.append(self._on_collection)

    def taken(self) -> float:
        """Seconds of garbage collections since the last call."""
        seconds, self._seconds = self._seconds, 0.0
        return seconds

    def remove(self) -> None:
        """Stop measuring."""
        if self._on_collection in gc.callbacks:
            gc.callbacks.remove(self._on_collection)

    def _on_collection(self, phase: str, _: dict[str, int]) -> None:
        if threading.get_ident() != self._thread:
            return
        if phase == "start":
            self._began = time.perf_counter()
        else:
            self._seconds += time.perf_counter() - self._began


def fetches(begins: Notify, ends: Notify) -> list[Watch]:
    """Watches of every DataLoader's iterator, including subclasses with their own ``__next__``."""
    kinds: list[Any] = [_BaseDataLoaderIter]
    for kind in kinds:  # the list grows during the loop
        kinds += kind.__subclasses__()
    return [Watch(kind, "__next__", begins, ends) for kind in kinds if "__next__" in vars(kind)]


def moves(begins: Notify, ends: Notify) -> list[Watch]:
    """Watches of tensors that are copied to a device."""
    return [
        Watch(torch.Tensor, "to", begins, ends, _to_another_device),
        Watch(torch.Tensor, "cuda", begins, ends, lambda tensor, *_, **__: not tensor.is_cuda),
    ]


def loader_of(iterator: Any) -> dict[str, Any]:
    """What a DataLoader's iterator knows about it: its processes, whether it reads a stream, whether it draws the
    whole data set on each rank, and as text the options of the ``pace.loader`` that replaces it; None if
    ``pace.loader`` has no counterpart of its sampler."""
    sampler, known = order_of(iterator._index_sampler)
    shuffled = getattr(sampler, "shuffle", type(sampler).__name__ != "SequentialSampler")
    needed = {
        "shuffle=False": not shuffled,
        "drop_last=True": iterator._drop_last,
        "num_workers={loader}.num_workers": iterator._num_workers,
        "worker_init_fn={loader}.worker_init_fn": getattr(iterator, "_worker_init_fn", None) is not None,
        "pin_memory={loader}.pin_memory": iterator._pin_memory,
        "collate_fn={loader}.collate_fn": iterator._collate_fn not in (default_collate, default_convert),
    }
    return {
        "processes": int(iterator._num_workers),
        "stream": iterator._dataset_kind == _DatasetKind.Iterable,
        "whole": known and type(sampler).__name__ != "DistributedSampler",
        "options": [option for option, wanted in needed.items() if wanted] if known else None,
    }


def _to_another_device(tensor: torch.Tensor, *arguments: Any, **named: Any) -> bool:
    """Whether ``tensor.to(...)`` with these arguments copies from the host, or another device, to a device."""
    target = named.get("device", named.get("other", arguments[0] if arguments else None))
    if isinstance(target, torch.Tensor):
        target = target.device
    if isinstance(target, int) and not isinstance(target, bool):
        return not tensor.is_cuda
    kind = target.partition(":")[0] if isinstance(target, str) else getattr(target, "type", None)
    return kind not in (None, "cpu", tensor.device.type)


PAUSE = (
    0.02  # mean seconds between two readings; the pauses vary, so that they do not coincide with the steps
)
ENOUGH = 5  # readings; a phase with fewer is left out
MOST = 0.5  # portion of a phase's readings that a line needs to be named
WIDTH = 60  # characters of a line that are shown
WITHIN = {  # the file of each phase's call: only the user's lines that run inside that call count
    Phase.FETCH: os.path.join("torch", "utils", "data", "dataloader.py"),
    Phase.FORWARD: os.path.join("torch", "nn", "parallel", "distributed.py"),
    Phase.BACKWARD: os.path.join("torch", "autograd", "__init__.py"),
}


class Lines:
    """Samples the lines of the thread that made this object, until ``stop``; ``found`` gives the result."""

    def __init__(self, phase: Callable[[], Phase]) -> None:
        self._phase, self._watched = phase, threading.get_ident()
        self._seen: dict[Phase, Counter[tuple[str, int] | None]] = {}
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="paceline-doctor", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Stop sampling; safe to call twice."""
        self._ended.set()

    def found(self) -> dict[str, str]:
        """The line that takes most of a phase's time, by the phase's name; a phase without one is left out."""
        lines = {}
        for phase, seen in list(self._seen.items()):
            looks = seen.total()
            where, count = seen.most_common(1)[0]
            if where is not None and looks >= ENOUGH and count >= MOST * looks:
                file, number = where
                text = linecache.getline(file, number).strip()
                text = text if len(text) <= WIDTH else text[: WIDTH - 3] + "..."
                lines[phase.name] = f"{os.path.basename(file)}, line {number}" + (f": {text}" if text else "")
        return lines

    def _run(self) -> None:
        vary = random.Random(os.getpid())
        while not self._ended.wait(PAUSE * vary.uniform(0.5, 1.5)):
            phase = self._phase()
            if phase is Phase.REDUCE:  # the rank waits for others
                continue
            frame = sys._current_frames().get(self._watched)
            where = place(frame, WITHIN.get(phase))
            del frame  # it keeps the training's variables alive
            self._seen.setdefault(phase, Counter({where: 0}))[where] += (
                1  # ``found`` must never see an empty counter
            )
