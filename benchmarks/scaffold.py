"""What the benchmarks share: their command lines, and ranks of a real gloo group in processes of their own."""

from __future__ import annotations

import argparse
import math
import multiprocessing
import os
from multiprocessing.context import ForkServerContext
from typing import Any


class _CommandLine(argparse.ArgumentParser):
    """Numbers are above 0 where their defaults are, else at least 0."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        asked, rest = super().parse_known_args(args, namespace)
        for action in self._actions:
            value = getattr(asked, action.dest, None)
            if isinstance(value, int | float) and not isinstance(value, bool):
                above = bool(action.default)
                if not 0 <= value < math.inf or (above and value == 0):
                    least = "above 0" if above else "of 0 or more"
                    name = (action.option_strings or [action.dest])[0]
                    self.error(f"{name} {value}: expected a number {least}")
        return asked, rest


def command_line(doc: str | None) -> argparse.ArgumentParser:
    """A command line whose help is a benchmark's docstring, as it stands."""
    return _CommandLine(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)


def counts(text: str) -> list[int]:
    """Several whole numbers above 0, with commas."""
    try:
        found = [int(part) for part in text.split(",")]
    except ValueError:
        found = [0]
    if min(found) < 1:
        raise argparse.ArgumentTypeError(f"{text}: expected whole numbers above 0, with commas")
    return found


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
