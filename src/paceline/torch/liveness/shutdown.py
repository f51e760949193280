"""A clean start and a clean end of the process group.

gloo's background thread may free DDP's last work while Python is already finalizing, which aborts the process
(SIGABRT) after a successful run. Releasing DDP's reducer first, then the group, avoids it. And a restarted attempt
under torchrun finds the addresses of the dead one in the store that it inherits, and would hang: so each attempt
gets its own prefix.
"""

from __future__ import annotations

import atexit
import gc
import multiprocessing
import os
import sys
import threading
import time
from datetime import timedelta
from multiprocessing.connection import wait
from typing import Any
from weakref import WeakSet

import torch
import torch.distributed as dist

from paceline.errors import PacelineError
from paceline.torch import hooks_of_torch

_joined = False  # ``join`` has made the process group
# The DistributedDataParallel modules of closed handles, which the program may still use; changed here alone.
_closed: WeakSet[Any] = WeakSet()
LOOK = 0.01  # seconds between two looks for the other ranks
GONE_SECONDS = 0.5  # to notice the end of a process whose connections are closed, at most


def leave(ddp: Any = None) -> None:
    """Release DDP's reducer, and those of closed handles, then the process group. Safe to call twice, and without a
    group."""
    for each in (ddp, *_closed):
        hooks_of_torch.release(each)
    if dist.is_available() and dist.is_initialized():
        gc.collect()  # DDP leaves reference cycles
        dist.destroy_process_group()


def leave_in_time(ddp: Any) -> None:
    """``leave`` now if ``join`` has made the process group; else at the program's end, since the script that has made
    it may go on with it and with DDP."""
    if ddp is not None:
        _closed.add(ddp)
    if _joined:
        leave()
    else:
        atexit.register(leave)


def end_with(other: Any) -> None:
    """End this process as soon as another one has ended, in any way.

    other: becomes readable then: a pipe whose other end only that process holds, or the process's sentinel.
    """

    def watch() -> None:
        wait([other])
        os._exit(1)

    threading.Thread(target=watch, name="end with", daemon=True).start()


def end_with_parent(_: int = 0) -> None:
    """End this process with the one that started it; for a DataLoader's processes, also as its ``worker_init_fn``.

    torch's own watch looks at the operating system's parent, which under forkserver is another process. The thread
    that passes tensors prints an error if the parent was killed meanwhile, which is suppressed.
    """
    if (parent := multiprocessing.parent_process()) is None:
        return
    end_with(parent.sentinel)
    before, gone = sys.excepthook, parent.sentinel

    def report(*error: Any) -> None:
        if not wait([gone], GONE_SECONDS):
            before(*error)

    sys.excepthook = report


def join(backend: str | None = None, timeout: float = 300.0) -> None:
    """Join the process group that torchrun describes; restarts work, also with gloo.

    Args:
        backend: "gloo", or "nccl", which has not been run yet; by default "nccl" if there is a GPU.
        timeout: Seconds for a collective.

    Raises:
        PacelineError: No launcher has set this process's rank and address.
    """
    if not all(name in os.environ for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")):
        raise PacelineError(
            "RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT are not all set; start this script with torchrun (under "
            "paceline.torch.launcher no group is joined: use ElasticPace with a plain model)"
        )
    global _joined
    wait = timedelta(seconds=timeout)
    store, rank, ranks = next(dist.rendezvous("env://", timeout=wait))
    _joined = True
    dist.init_process_group(
        backend or ("nccl" if torch.cuda.is_available() else "gloo"),
        store=dist.PrefixStore(_attempt(store, rank, ranks, timeout), store),
        rank=rank,
        world_size=ranks,
        timeout=wait,
    )


def _attempt(store: Any, rank: int, ranks: int, seconds: float) -> str:
    """A name for this start of the ranks, since each torchrun counts only its own restarts. Rank 0 makes it, and
    publishes it under every name in the store, those of dead ranks too, until each living rank has read it."""
    mine, others, until = os.urandom(8).hex(), range(1, ranks), time.monotonic() + seconds
    store.set(f"start/{rank}", mine)
    if rank:
        mine = store.get(f"start/{mine}").decode()
        store.set(f"{mine}/{rank}", "")
    elif others:
        while time.monotonic() < until and not store.check([f"{mine}/{other}" for other in others]):
            for other in others:
                store.set(f"start/{store.get(f'start/{other}').decode()}", mine)
            time.sleep(LOOK)
    return mine
