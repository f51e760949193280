"""Within the program as it was before the port: record the options of optimizer steps, and the length of an epoch.

``enter`` is called where the program makes its first optimizer. Nothing of the program is changed.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.data import DataLoader
from torch.utils.data.dataloader import _BaseDataLoaderIter

from paceline.verify import record


def enter(make: Callable[..., None], optimizer: Any, *arguments: Any, **named: Any) -> None:
    """Make the program's first optimizer, and watch it and all that follow."""
    Unported(json.loads(os.environ[record.PLAN])).watch()
    make(optimizer, *arguments, **named)


class Unported:
    """One rank. plan: what ``command`` asks for."""

    def __init__(self, plan: dict[str, Any]) -> None:
        self._steps, self._folder = plan["steps"], Path(plan["place"]) / plan["name"]
        self._optimizers: list[Any] = []
        self._taken: list[int] = []  # steps of each optimizer
        self._record: record.Writer | None = None
        self._loaders: dict[int, Any] = {}  # of each running iteration, its loader
        self._last: Any = None  # the loader that gave the last batch
        self._drawn = 0  # batches of that loader since the last step

    def watch(self) -> None:
        """Notice optimizer steps and the batches between them."""
        iterate, following = DataLoader.__iter__, _BaseDataLoaderIter.__next__

        def begin(loader: Any) -> Any:
            batches = iterate(loader)
            self._loaders[id(batches)] = loader
            return batches

        def draw(batches: Any) -> Any:
            batch = following(batches)
            loader = self._loaders.get(id(batches))
            self._drawn = self._drawn + 1 if loader is self._last else 1
            self._last = loader
            return batch

        DataLoader.__iter__ = begin  # type: ignore[method-assign]
        _BaseDataLoaderIter.__next__ = draw  # type: ignore[method-assign,assignment]
        register_optimizer_step_pre_hook(self._before_step)

    def _before_step(self, optimizer: Any, *_: Any) -> None:
        joined = dist.is_available() and dist.is_initialized()
        rank = dist.get_rank() if joined else int(os.environ.get("RANK", "0"))
        ranks = dist.get_world_size() if joined else 1
        if self._record is None:
            self._record = record.Writer(self._folder / f"{rank}.jsonl")
        at = next((at for at, each in enumerate(self._optimizers) if each is optimizer), len(self._taken))
        if at == len(self._taken):
            self._optimizers.append(optimizer)
            self._taken.append(0)
        number, self._taken[at] = self._taken[at], self._taken[at] + 1
        self._record.line("step", optimizer=at, number=number, options=record.options(optimizer))
        if self._drawn and hasattr(self._last, "__len__"):
            self._record.line("epoch", batches=len(self._last), between=self._drawn)
        self._drawn = 0
        if number + 1 >= self._steps:
            record.leave(self._record, self._folder, rank, ranks)
