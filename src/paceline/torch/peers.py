"""Who else takes part: ranks, what their machines are, and whether all were set up alike."""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

import numpy as np
import torch.distributed as dist

from paceline.errors import PacelineError
from paceline.rounds import Machines

T = TypeVar("T")


def rank() -> int:
    """This process's rank; 0 outside of a process group."""
    return dist.get_rank() if dist.is_initialized() else 0


def ranks() -> int:
    """n; 1 outside of a process group."""
    return dist.get_world_size() if dist.is_initialized() else 1


def gather(item: Any) -> list[Any]:
    """``item`` of every rank, by rank. Collective."""
    if ranks() == 1:
        return [item]
    items: list[Any] = [None] * ranks()
    dist.all_gather_object(items, item)
    return items


def agree(facts: dict[str, Any], extra: Any = None) -> list[Any]:
    """Make sure that all ranks were given the same ``facts``; returns every rank's ``extra``. Collective.

    Raises PacelineError on every rank, naming the first rank and the first fact that differ from rank 0's.
    """
    everyone = gather((facts, extra))
    for other, (theirs, _) in enumerate(everyone):
        for name, value in everyone[0][0].items():
            if theirs[name] != value:
                raise PacelineError(
                    f"rank {other} was given {name}={theirs[name]!r} and rank 0 {name}={value!r}; "
                    "expected the same on every rank"
                )
    return [theirs for _, theirs in everyone]


def on_rank_0(action: Callable[[], T]) -> T | None:
    """What ``action`` returns on rank 0, None elsewhere; its PacelineError is raised on every rank. Collective."""
    result, complaint = None, ""
    if rank() == 0:
        try:
            result = action()
        except PacelineError as error:
            complaint = str(error)
    complaint = gather(complaint)[0]
    if complaint:
        raise PacelineError(complaint)
    return result


def own_store(timeout: float) -> dist.TCPStore:
    """A TCPStore that rank 0 hosts where it already is the rendezvous, apart from the process group's. Collective."""
    wait = timedelta(seconds=timeout)
    store: dist.TCPStore | None = None
    address: list[object] = [None]
    if rank() == 0:
        host = os.environ.get("MASTER_ADDR", "127.0.0.1")
        store = dist.TCPStore(host, 0, ranks(), True, wait_for_workers=False, timeout=wait)
        address = [(host, store.port)]
    dist.broadcast_object_list(address, src=0)
    if store is None:
        there: tuple[str, int] = address[0]  # type: ignore[assignment]
        store = dist.TCPStore(*there, ranks(), False, wait_for_workers=False, timeout=wait)
    return store


def machines() -> Machines:
    """Every rank's CPUs, cores and memory (GiB), for policies that divide by them. Collective."""
    import psutil

    cpus = float(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)
    cores = float(min(psutil.cpu_count(logical=False) or cpus, cpus))
    rows = np.array(gather((cpus, cores, psutil.virtual_memory().total / 2**30)))
    return Machines(cpus=rows[:, 0], cores=rows[:, 1], memory=rows[:, 2])


def joined() -> bool:
    """True inside a process group."""
    return dist.is_available() and dist.is_initialized()
