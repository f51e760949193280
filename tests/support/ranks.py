"""Runs a function on n ranks of a real gloo group, in processes forked from a server that has torch loaded."""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import traceback
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any

from support import forks

SECONDS = 900  # only a hang lasts so long: two cores may be busy with other tests
WAITS = 300.0  # seconds that the process group waits for a rank


def run_ranks(
    ranks: int,
    job: Callable[..., Any],
    *arguments: Any,
    seconds: float | None = SECONDS,
    starts: bool = False,
) -> list[Any]:
    """``job(rank, ranks, *arguments)`` on every rank; what each returned, by rank.

    seconds: within which a rank is to answer; None for no limit. starts: the ranks start processes by forkserver or
    spawn, which then load nothing once more.

    A rank's exception is raised here with its traceback; a rank that aborts at its end fails the call too.
    """
    with tempfile.TemporaryDirectory() as directory:
        pipes, workers = [], []
        for rank in range(ranks):
            ours, theirs = multiprocessing.Pipe(duplex=False)
            workers.append(
                forks.Fork(
                    _life, rank, ranks, directory, theirs, starts, job, arguments, daemon=False
                ).process
            )
            theirs.close()
            pipes.append(ours)
        results: list[Any] = []
        failures: list[str] = []
        try:
            for rank, pipe in enumerate(pipes):
                if not pipe.poll(2 if failures else seconds):  # after a failure, what the others have to say
                    failures.append(f"rank {rank} did not answer within {seconds} s")
                    continue
                try:
                    kind, value = pipe.recv()
                except EOFError:
                    kind, value = "failed", "ended without an answer"
                if kind == "failed":
                    failures.append(f"rank {rank}:\n{value}")
                else:
                    results.append(value)
            for rank, worker in enumerate(workers):
                worker.join(10 if not failures else 1)
                if not failures and worker.exitcode:
                    failures.append(f"rank {rank} ended with status {worker.exitcode}")
        finally:
            for worker in workers:
                if worker.is_alive():
                    worker.kill()
                worker.join()
        if failures:
            raise AssertionError("\n".join(failures))
        return results


def run_cases(
    ranks: int, job: Callable[..., Any], cases: Mapping[str, Mapping[str, Any]], **options: Any
) -> dict[str, list[Any]]:
    """``job(rank, ranks, **case)`` for each case on the same ranks; by case, what each rank returned.

    options: as ``run_ranks`` has them."""
    found = run_ranks(ranks, _each, job, list(cases.values()), **options)
    return dict(zip(cases, map(list, zip(*found, strict=True)), strict=True))


def _each(rank: int, ranks: int, job: Callable[..., Any], cases: list[Mapping[str, Any]]) -> list[Any]:
    return [job(rank, ranks, **case) for case in cases]


def errors_of(ranks: int, job: Callable[..., object], *arguments: Any) -> list[str]:
    """The message of the ``PacelineError`` that ends ``job(rank, ranks, *arguments)`` on each rank; else ""."""
    return run_ranks(ranks, _error_of, job, arguments)


def _error_of(rank: int, ranks: int, job: Callable[..., object], arguments: tuple[Any, ...]) -> str:
    from paceline.errors import PacelineError

    try:
        job(rank, ranks, *arguments)
    except PacelineError as error:
        return str(error)
    return ""


def gathered(item: object) -> list[Any]:
    """Called on every rank: ``item`` of each of them."""
    import torch.distributed as dist

    items: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(items, item)
    return items


def _life(
    rank: int,
    ranks: int,
    directory: str,
    pipe: Any,
    starts: bool,
    job: Callable[..., Any],
    arguments: tuple[Any, ...],
) -> None:
    import torch
    import torch.distributed as dist

    if starts:
        forks.start_warm()
    torch.set_num_threads(1)
    multiprocessing.set_start_method("fork", force=True)  # of loaders' processes, as in a program of its own
    try:
        store = dist.FileStore(os.path.join(directory, "store"), ranks)
        dist.init_process_group(
            "gloo", store=store, rank=rank, world_size=ranks, timeout=timedelta(seconds=WAITS)
        )
        # A rank that is done closes its connections, which another may still be making. (A barrier would start
        # threads, whose memory some bodies measure.)
        store.set(f"connected {rank}", "")
        store.wait([f"connected {each}" for each in range(ranks)])
        pipe.send(("done", job(rank, ranks, *arguments)))
    except BaseException:
        pipe.send(("failed", traceback.format_exc()))
        pipe.close()
        os._exit(0)
    finally:
        pipe.close()
