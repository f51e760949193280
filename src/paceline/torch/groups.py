"""Process groups of all ranks beside the default one, each for collectives in an order of their own.

A group whose collectives are complete is used again. It is not destroyed, since that closes connections from which
another rank may still read the end of its last collective; and what it holds, threads and connections to all other
ranks, does not become more with each handle that the program makes.
"""

from __future__ import annotations

import weakref
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from paceline.torch import peers

# The groups that are free, with their backends. torch keeps them until the default group is destroyed.
_free: list[tuple[str | None, weakref.ref[Any]]] = []


def take(backend: str | None = None) -> Any:
    """A group of all ranks that nothing else uses. backend: by default that of the default group. Collective."""
    mine = {
        group.group_name: group
        for of, reference in _free
        if of == backend and (group := reference()) is not None and _lives(group)
    }
    common = set.intersection(*map(set, peers.gather(list(mine))))
    if not common:
        return dist.new_group(backend=backend, timeout=timedelta(seconds=peers.timeout()))
    chosen = mine[min(common)]
    _free[:] = [(of, reference) for of, reference in _free if reference() not in (None, chosen)]
    return chosen


def give(group: Any, backend: str | None = None) -> None:
    """Free a group that ``take`` returned for this backend. All collectives that this rank has begun on it must be
    complete; if they are not on another rank, that rank must not give it."""
    _free.append((backend, weakref.ref(group)))


def _lives(group: Any) -> bool:
    """Whether the group was not destroyed, with the default one."""
    try:
        return bool(dist.get_process_group_ranks(group))
    except (KeyError, ValueError):
        return False
