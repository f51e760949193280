"""A clean start and a clean end of the process group.

gloo's background thread may free DDP's last work while Python is already finalizing, which aborts the process
(SIGABRT) after a successful run. Releasing DDP's reducer first, then the group, avoids it. And a restarted attempt
under torchrun finds the addresses of the dead one in the store that it inherits, and would hang: so each attempt
gets a prefix of its own.
"""

from __future__ import annotations

import atexit
import gc
import multiprocessing
import os
import sys
import threading
from datetime import timedelta
from multiprocessing.connection import wait
from typing import Any

import torch
import torch.distributed as dist

from paceline.errors import PacelineError

_joined = False  # ``join`` has made the process group
GONE_SECONDS = 0.5  # to notice the end of a process whose connections are closed, at most


def leave(ddp: Any = None) -> None:
    """Release DDP's reducer, then the process group. Safe to call twice, and without a group."""
    if ddp is not None and getattr(ddp, "reducer", None) is not None:
        ddp.reducer = None
    if dist.is_available() and dist.is_initialized():
        gc.collect()  # DDP leaves reference cycles
        dist.destroy_process_group()


def leave_in_time() -> None:
    """Leave the process group now if ``join`` has made it; else at the program's end, unless the script that has made
    it has destroyed it by then."""
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

    backend: "gloo", or "nccl", which has not been run yet; by default "nccl" if there is a GPU. timeout: seconds for
        a collective.
    Raises PacelineError if no launcher has set this process's rank and address.
    """
    if not all(name in os.environ for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")):
        raise PacelineError(
            "RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT are not all set; start this script with torchrun (under "
            "paceline.torch.launcher no group is joined: give Pace a plain model and elastic=True)"
        )
    global _joined
    wait = timedelta(seconds=timeout)
    store, rank, ranks = next(dist.rendezvous("env://", timeout=wait))
    _joined = True
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    dist.init_process_group(
        backend or ("nccl" if torch.cuda.is_available() else "gloo"),
        store=dist.PrefixStore(f"attempt{attempt}", store),
        rank=rank,
        world_size=ranks,
        timeout=wait,
    )
