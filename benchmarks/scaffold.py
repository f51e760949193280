"""What the benchmarks share: their command lines, and ranks of a real gloo group in processes of their own."""

from __future__ import annotations

import argparse
import multiprocessing
import os
from multiprocessing.context import ForkServerContext


def command_line(doc: str | None) -> argparse.ArgumentParser:
    """A command line whose help is a benchmark's docstring, as it stands."""
    return argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)


def forks() -> ForkServerContext:
    """Where to start ranks: from a server that has torch loaded, with one thread each."""
    os.environ.update(OMP_NUM_THREADS="1", GLOO_SOCKET_IFNAME="lo")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "torch.distributed", "paceline.torch"])
    return context


def join(rank: int, ranks: int, directory: str) -> None:
    """Join the others, who have the same directory and join nobody else there."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    store = dist.FileStore(os.path.join(directory, "store"), ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
