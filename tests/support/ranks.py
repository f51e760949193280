"""Runs a function on n ranks of a real gloo group, in processes forked from a server that has torch loaded."""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing import forkserver
from typing import Any

SECONDS = 900  # only a hang lasts so long: two cores may be busy with other tests
# What the server of forks has loaded: a host framework takes seconds of processor time to import, in each rank.
LOADED = ("torch", "torch.distributed", "torch._dynamo", "numpy", "paceline.torch")
# A server that has them all serves the tests of every host: each start of another one would load PyTorch once more.
HOSTS = (
    "lightning", "accelerate", "transformers.trainer", "transformers.models.llama", "transformers.models.bert",
)  # fmt: skip
JOBS_OF_HOSTS = {
    "lightning_jobs", "fabric_jobs", "accelerate_jobs", "accelerate_loops", "trainer_jobs", "trainer_evaluates",
    "ported",
}  # fmt: skip
FROZEN = "paceline.train.forked"


def load(*modules: str) -> None:
    """Have these modules loaded in the server of forks, which starts once more where it has others."""
    wanted = {*LOADED, *modules}
    if not wanted <= _loaded:
        _loaded.update(wanted)
        forkserver._forkserver._stop()  # type: ignore[attr-defined]
        forkserver.set_forkserver_preload([*sorted(_loaded), FROZEN])


_loaded: set[str] = set()


def run_ranks(
    ranks: int, job: Callable[..., Any], *arguments: Any, seconds: float | None = SECONDS
) -> list[Any]:
    """``job(rank, ranks, *arguments)`` on every rank; what each returned, by rank.

    seconds: within which a rank is to answer; None for no limit.

    A rank's exception is raised here with its traceback; a rank that aborts at its end fails the call too.
    """
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    load(*(HOSTS if job.__module__.rpartition(".")[2] in JOBS_OF_HOSTS else ()))
    context = multiprocessing.get_context("forkserver")
    with tempfile.TemporaryDirectory() as directory:
        pipes, workers = [], []
        for rank in range(ranks):
            ours, theirs = context.Pipe(duplex=False)
            worker = context.Process(target=_life, args=(rank, ranks, directory, theirs, job, arguments))
            worker.start()
            theirs.close()
            pipes.append(ours)
            workers.append(worker)
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


def _life(
    rank: int, ranks: int, directory: str, pipe: Any, job: Callable[..., Any], arguments: tuple[Any, ...]
) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    multiprocessing.set_start_method("fork", force=True)  # of loaders' processes, as in a program of its own
    try:
        store = dist.FileStore(os.path.join(directory, "store"), ranks)
        dist.init_process_group(
            "gloo", store=store, rank=rank, world_size=ranks, timeout=timedelta(seconds=60)
        )
        pipe.send(("done", job(rank, ranks, *arguments)))
    except BaseException:
        pipe.send(("failed", traceback.format_exc()))
        pipe.close()
        os._exit(0)
    finally:
        pipe.close()
