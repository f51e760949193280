"""What the benchmarks share: their command lines, and ranks of a real gloo group in processes of their own."""

from __future__ import annotations

import argparse
import io
import math
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from multiprocessing.context import ForkServerContext
from typing import Any, TypeVar

from paceline import Cluster, policies
from paceline.errors import PacelineError

T = TypeVar("T")
EVERY = 5.0  # seconds between two lines of progress
PLAIN = ("plain DDP, equal", "plain DDP, by hand")


class _CommandLine(argparse.ArgumentParser):
    """Numbers are above 0 where their defaults are, else at least 0. What the benchmark does is printed at once, and
    later each line as soon as it is complete, also into a pipe."""

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
        does = (self.description or "").strip().partition("\n")[0]
        print(f"{self.prog}: {does}", file=sys.stderr, flush=True)
        if isinstance(sys.stdout, io.TextIOWrapper):
            sys.stdout.reconfigure(line_buffering=True)
        return asked, rest


def command_line(doc: str | None) -> argparse.ArgumentParser:
    """A command line whose help is a benchmark's docstring, as it stands."""
    return _CommandLine(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)


def counter(label: str) -> Callable[[int, int], None]:
    """Call the result with the done and the total amount: a line on standard error every few seconds shows them.

    It has no thread of its own, which would disturb what is measured.
    """
    last = time.monotonic()

    def show(done: int, total: int) -> None:
        nonlocal last
        if time.monotonic() - last > EVERY:
            last = time.monotonic()
            print(f"{label}: {done:,} of {total:,}", file=sys.stderr, flush=True)

    return show


def progress(items: Iterable[T], label: str) -> Iterator[T]:
    """The items, while a ``counter`` shows how many are done."""
    each, show = list(items), counter(label)
    for done, item in enumerate(each):
        show(done, len(each))
        yield item


def counts(text: str) -> list[int]:
    """Several whole numbers above 0, with commas."""
    try:
        found = [int(part) for part in text.split(",")]
    except ValueError:
        found = [0]
    if min(found) < 1:
        raise argparse.ArgumentTypeError(f"{text}: expected whole numbers above 0, with commas")
    return found


def count(text: str) -> int:
    """A whole number above 0."""
    if not (text.isdecimal() and int(text) > 0):
        raise argparse.ArgumentTypeError(f"{text}: expected a whole number above 0")
    return int(text)


def policy_name(text: str) -> str:
    """What real ranks can run: a policy's name, with its options."""
    try:
        if policies.create(text, Cluster(2, 64)).needs_upcoming:
            raise PacelineError(
                f"{text} needs to know the next round: expected a policy that real ranks can run"
            )
    except PacelineError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return text


def way_name(text: str) -> str:
    """A policy, or plain DDP with one of its divisions."""
    return text if text in PLAIN else policy_name(text)


def forks(*more: str) -> ForkServerContext:
    """Where to start ranks: from a server that has torch loaded, and ``more`` modules, with one thread each.

    A benchmark that SIGTERM ends, as ``timeout`` sends it, takes its ranks with it."""
    os.environ.update(OMP_NUM_THREADS="1", GLOO_SOCKET_IFNAME="lo")
    signal.signal(signal.SIGTERM, _end)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "torch.distributed", "paceline.torch", *more])
    return context


def _end(number: int, _: object) -> None:
    for child in multiprocessing.active_children():
        child.kill()
    os._exit(128 + number)


def join(rank: int, ranks: int, directory: str) -> None:
    """Join the others, who have the same directory and join nobody else there."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    store = dist.FileStore(os.path.join(directory, "store"), ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
