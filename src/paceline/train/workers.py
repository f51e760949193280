"""What all local workers of ``paceline train`` have in common, however they sum: a quick start, and an end with the
command that started them."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
from collections.abc import Iterator
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext

import torch

from paceline.torch.liveness.shutdown import end_with


def context() -> ForkServerContext:
    """Starts processes that have PyTorch loaded: they are forked from a small server."""
    found = multiprocessing.get_context("forkserver")
    found.set_forkserver_preload(
        [
            "torch",
            "torch.distributed",
            "torch._dynamo",
            "paceline.train.elastic_engine",
            "paceline.train.forked",
        ]
    )
    return found


def begin(life: Connection, ignored: tuple[str, ...]) -> None:
    """First of all in a worker. life: readable as soon as the command has ended; then the worker ends, too.

    ignored: names of signals that may reach the whole group, as Ctrl-C does: the command, which they reach too, ends
    the worker in order.
    """
    for name in ignored:
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), signal.SIG_IGN)
    end_with(life)
    torch.set_num_threads(1)
    # Loaders' processes are forked from their worker, as in a program of one rank; otherwise each worker starts a
    # server of its own for them, which has PyTorch to load first, and the names of semaphores outlive a worker that
    # ends at once.
    multiprocessing.set_start_method("fork", force=True)


def lost_its_loader(error: Exception) -> bool:
    """Whether this is what torch raises in a worker one of whose loader's processes was killed, as where memory is
    short. What such a process itself raises begins with other words."""
    return isinstance(error, RuntimeError) and str(error).startswith("DataLoader worker (pid")


@contextlib.contextmanager
def environment(**values: str) -> Iterator[None]:
    """Environment variables for the workers, where the user hasn't set them."""
    fresh = {name: value for name, value in values.items() if name not in os.environ}
    os.environ.update(fresh)
    try:
        yield
    finally:
        for name in fresh:
            del os.environ[name]
