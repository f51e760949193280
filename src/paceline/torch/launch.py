"""Starts the local workers of ``paceline train``, watches them, and ends them together.

The workers are forked from a small server that has torch loaded, so many start quickly. Each reports over a
pipe of its own; whoever dies is noticed at once and named, and the others are ended.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from paceline.errors import PacelineError, WorkerError
from paceline.torch.config import TrainConfig
from paceline.torch.patience import Missing

GRACE_SECONDS = 3.0  # between asking a worker to end and making it
TIMEOUT_SECONDS = 600.0
LOOPBACK = "127.0.0.1"


def run(
    config: TrainConfig,
    run_dir: Path,
    on_event: Callable[[dict[str, Any]], None],
    resume: bool = False,
    port: int = 0,
) -> dict[str, Any]:
    """Train on ``config.workers`` local processes; returns the summary that rank 0 made.

    port: where the workers meet; 0 takes any free one.
    Raises PacelineError for what a worker found wrong with its input, WorkerError when one failed or was killed.
    """
    try:
        store = dist.TCPStore(
            LOOPBACK, port, None, True, timedelta(seconds=TIMEOUT_SECONDS), wait_for_workers=False
        )
    except (RuntimeError, dist.DistError) as error:
        raise PacelineError(
            f"port {port} cannot be used on this machine; choose another, or 0 for any"
        ) from error
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "torch.distributed", "numpy", "paceline.torch.training"])
    workers: list[ForkServerProcess] = []
    pipes: list[Connection] = []
    try:
        with _environment(OMP_NUM_THREADS="1", GLOO_SOCKET_IFNAME="lo"):
            for rank in range(config.workers):
                ours, theirs = context.Pipe(duplex=False)
                worker = context.Process(
                    target=_work,
                    args=(config, run_dir, resume, rank, store.port, theirs),
                    name=f"worker {rank}",
                )
                worker.start()
                theirs.close()
                workers.append(worker)
                pipes.append(ours)
        with _interrupts() as interrupted:
            return _watch(workers, pipes, on_event, run_dir, interrupted)
    finally:
        _end(workers)
        del store


def _watch(
    workers: list[ForkServerProcess],
    pipes: list[Connection],
    on_event: Callable[[dict[str, Any]], None],
    run_dir: Path,
    interrupted: threading.Event,
) -> dict[str, Any]:
    """Pass on events until every worker has ended; the summary."""
    summary: dict[str, Any] | None = None
    complaints: dict[int, tuple[str, str]] = {}
    open_pipes = dict(enumerate(pipes))
    running = dict(enumerate(workers))
    newest = 0
    while running:
        if interrupted.is_set():
            raise KeyboardInterrupt
        ready = wait([*open_pipes.values(), *(w.sentinel for w in running.values())])
        for rank, worker in list(running.items()):
            ended = worker.sentinel in ready
            pipe = open_pipes.get(rank)
            # A loader's child may hold the pipe open after its worker's death: no waiting for its end.
            while pipe is not None and (pipe.poll() if ended else pipe in ready):
                try:
                    event = pipe.recv()
                except (EOFError, OSError):
                    del open_pipes[rank]
                    break
                if event["type"] == "done":
                    summary = event["summary"]
                elif event["type"] in ("input", "fault"):
                    complaints[rank] = (event["type"], event["message"])
                else:
                    newest = event.get("round", newest)
                    on_event(event)
                if not ended:
                    break
            if ended:
                worker.join()
                del running[rank]
                open_pipes.pop(rank, None)
                if worker.exitcode:
                    _raise(rank, worker.exitcode, complaints, newest, run_dir)
    if summary is None:
        raise WorkerError("the workers ended without a result; look at what they printed")
    return summary


@contextlib.contextmanager
def _interrupts() -> Iterator[threading.Event]:
    """Ctrl-C as ever, and an event that remembers it: one that comes while an object is being destroyed is lost."""
    interrupted = threading.Event()
    if (
        threading.current_thread() is not threading.main_thread()  # the one that hears of signals
        or signal.getsignal(signal.SIGINT) is not signal.default_int_handler  # somebody else's affair
    ):
        yield interrupted
        return

    def interrupt(*_: object) -> None:
        interrupted.set()
        raise KeyboardInterrupt

    signal.signal(signal.SIGINT, interrupt)
    try:
        yield interrupted
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _raise(rank: int, code: int, complaints: dict[int, tuple[str, str]], newest: int, run_dir: Path) -> None:
    """Say what ended the run: a wrong input, a fault of a worker's own, or a signal from outside."""
    if code < 0:
        name = signal.Signals(-code).name
        raise WorkerError(
            f"worker {rank} was killed by {name} after round {newest}; the other workers were ended; go on from "
            f"the last checkpoint with --resume {run_dir}"
        )
    kind, message = complaints.get(rank, ("fault", f"exit status {code}"))
    if kind == "input":
        raise PacelineError(message)
    raise WorkerError(f"worker {rank} failed after round {newest}: {message}")


def _end(workers: list[ForkServerProcess]) -> None:
    for worker in workers:
        if worker.is_alive():
            worker.terminate()
    deadline = time.monotonic() + GRACE_SECONDS
    for worker in workers:
        worker.join(max(0.0, deadline - time.monotonic()))
        if worker.is_alive():
            worker.kill()
            worker.join()


def _work(config: TrainConfig, run_dir: Path, resume: bool, rank: int, port: int, pipe: Connection) -> None:
    """A worker's life."""
    from paceline.torch.training import train

    signal.signal(
        signal.SIGINT, signal.SIG_IGN
    )  # Ctrl-C reaches the whole group; the launcher ends it in order
    torch.set_num_threads(1)

    def emit(event: dict[str, Any]) -> None:
        pipe.send(event)

    def missed(missing: Missing) -> None:
        """Nothing but an end frees a thread that waits in a reduction; the record and the checkpoint are whole."""
        emit({"type": "fault", "message": str(missing)})
        os._exit(1)

    try:
        span = timedelta(seconds=TIMEOUT_SECONDS)
        store = dist.TCPStore(LOOPBACK, port, None, False, span, wait_for_workers=False)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=config.workers, timeout=span)
        summary = train(config, run_dir, emit, resume, missed)
        if rank == 0:
            emit({"type": "done", "summary": summary})
        pipe.close()
    except PacelineError as error:
        kind = "fault" if isinstance(error, WorkerError) else "input"
        emit({"type": kind, "message": str(error)})
        pipe.close()
        os._exit(2)
    except Exception as error:
        # A peer that died shows up as a RuntimeError in here; the launcher tells the two apart.
        emit({"type": "fault", "message": f"{type(error).__name__}: {str(error).splitlines()[0]}"})
        time.sleep(1.0)  # let the one who died be noticed first
        pipe.close()
        os._exit(1)


@contextlib.contextmanager
def _environment(**values: str) -> Any:
    """Environment variables for the workers, where the user hasn't set them."""
    fresh = {name: value for name, value in values.items() if name not in os.environ}
    os.environ.update(fresh)
    try:
        yield
    finally:
        for name in fresh:
            del os.environ[name]
