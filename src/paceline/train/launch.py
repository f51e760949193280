"""Starts the local workers of ``paceline train``, watches them, and ends them together.

The workers are forked from a small server that has torch loaded, so many start quickly. Each reports over a
pipe of its own; whoever dies is noticed at once and named, and the others are ended. Another pipe is open for as long
as this process lives: a worker ends when it closes, so that none is left behind whatever becomes of this process.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import torch.distributed as dist

from paceline.errors import PacelineError, WorkerError
from paceline.runs.run import CONFIG
from paceline.torch.liveness.stall import Missing
from paceline.train import workers as common
from paceline.train.config import TrainConfig
from paceline.train.contents import CHECKPOINT
from paceline.train.stopped import Stopped

SIGNAL_SECONDS = 0.3  # a signal that ended a worker may have been meant for all: it gets here within them
POLL_SECONDS = 1.0
TIMEOUT_SECONDS = 600.0
LOOPBACK = "127.0.0.1"


def run(
    config: TrainConfig,
    run_dir: Path,
    on_event: Callable[[dict[str, Any]], None],
    resume: bool = False,
    port: int = 0,
    interrupted: Callable[[], bool] = lambda: False,
) -> dict[str, Any]:
    """Train on ``config.workers`` local processes; returns the summary that rank 0 made.

    port: where the workers meet; 0 takes any free one. interrupted: whether the user has asked for the end.
    on_event: takes ``{"type": "starting", "ready": ..., "workers": ...}`` as workers come, then rank 0's events.
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
    context = common.context()
    workers: list[ForkServerProcess] = []
    pipes: list[Connection] = []
    life, held = context.Pipe(duplex=False)
    try:
        with common.environment(OMP_NUM_THREADS="1", GLOO_SOCKET_IFNAME="lo"):
            for rank in range(config.workers):
                ours, theirs = context.Pipe(duplex=False)
                worker = context.Process(
                    target=_work,
                    args=(config, run_dir, resume, rank, store.port, theirs, life),
                    name=f"worker {rank}",
                )
                workers.append(worker)
                pipes.append(ours)
                worker.start()
                theirs.close()
        on_event({"type": "starting", "ready": 0, "workers": config.workers})
        stopped = Stopped({rank: w.pid for rank, w in enumerate(workers) if w.pid}, config.patience)
        return _watch(workers, pipes, on_event, run_dir, interrupted, stopped)
    finally:
        held.close()
        life.close()
        _end(workers)
        del store


def _watch(
    workers: list[ForkServerProcess],
    pipes: list[Connection],
    on_event: Callable[[dict[str, Any]], None],
    run_dir: Path,
    interrupted: Callable[[], bool],
    stopped: Stopped,
) -> dict[str, Any]:
    """Pass on events until every worker has ended; the summary."""
    summary: dict[str, Any] | None = None
    complaints: dict[int, tuple[str, str]] = {}
    open_pipes = dict(enumerate(pipes))
    running = dict(enumerate(workers))
    newest: int | None = None
    ready_ranks = 0
    while running:
        if interrupted():  # and the exception was lost, as in an object's destruction
            raise KeyboardInterrupt
        ready = wait([*open_pipes.values(), *(w.sentinel for w in running.values())], POLL_SECONDS)
        stopped.look(f"the run was ended; {how_to_go_on(run_dir)}")
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
                if event["type"] == "ready":
                    ready_ranks += 1
                    on_event({"type": "starting", "ready": ready_ranks, "workers": len(workers)})
                elif event["type"] == "done":
                    summary = event["summary"]
                elif event["type"] in ("input", "fault", "missed"):
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
                    time.sleep(SIGNAL_SECONDS)
                    _raise(rank, worker.exitcode, complaints, newest, run_dir)
    if summary is None:
        raise WorkerError("the workers ended without a result; look at what they printed")
    return summary


def _raise(
    rank: int, code: int, complaints: dict[int, tuple[str, str]], newest: int | None, run_dir: Path
) -> None:
    """Say what ended the run: a wrong input, a fault of a worker's own, a frozen one, or a signal from outside."""
    when = "before the first round was done" if newest is None else f"after round {newest}"
    if code < 0:
        name = signal.Signals(-code).name
        raise WorkerError(
            f"worker {rank} was killed by {name} {when}; the other workers were ended; {how_to_go_on(run_dir)}"
        )
    kind, message = complaints.get(rank, ("fault", f"exit status {code}"))
    if kind == "input":
        raise PacelineError(message)
    if kind == "missed":
        raise WorkerError(f"{message}; the run was ended; {how_to_go_on(run_dir)}")
    raise failure(rank, when, message, run_dir)


def failure(rank: int, when: str, message: str, run_dir: Path) -> WorkerError:
    """A worker has failed by an error of its own. when: as in "after round 3"."""
    advice = f"; {how_to_go_on(run_dir)}" if (run_dir / CHECKPOINT).exists() else ""
    return WorkerError(
        f"worker {rank} failed {when}: {message.rstrip('.')}; the other workers were ended{advice}"
    )


def how_to_go_on(run_dir: Path) -> str:
    """What a user can do with what the run has written so far."""
    if (run_dir / CHECKPOINT).exists():
        return f"go on from the last checkpoint with --resume {run_dir}"
    if (run_dir / CONFIG).exists():
        return f"there was no checkpoint yet: start the run from its beginning with --resume {run_dir}"
    return "nothing of the run was written yet: start it again"


def _end(workers: list[ForkServerProcess]) -> None:
    for worker in workers:
        if worker.is_alive():
            worker.kill()  # also where it is stopped
    for worker in workers:
        if worker.pid is not None:
            worker.join()


def _work(
    config: TrainConfig,
    run_dir: Path,
    resume: bool,
    rank: int,
    port: int,
    pipe: Connection,
    life: Connection,
) -> None:
    """A worker's life."""
    common.begin(life, ("SIGINT", "SIGTERM", "SIGHUP"))
    from paceline.train.torch_engine import train

    def emit(event: dict[str, Any]) -> None:
        pipe.send(event)

    def missed(missing: Missing) -> None:
        """Nothing but an end frees a thread that waits in a reduction; the record and the checkpoint are whole."""
        emit({"type": "missed", "message": missing.words})
        os._exit(1)

    try:
        emit({"type": "ready"})
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
        if kind == "fault":
            time.sleep(1.0)  # another rank is the reason: let that one be noticed first
        pipe.close()
        os._exit(2)
    except Exception as error:
        # A peer that died shows up as a RuntimeError in here; the launcher tells the two apart.
        emit({"type": "fault", "message": words(error)})
        time.sleep(1.0)  # let the one who died be noticed first
        pipe.close()
        os._exit(1)


def words(error: Exception) -> str:
    """An error in one line; of one in a loader's process, torch hands on the traceback, which ends with the error."""
    lines = str(error).strip().splitlines() or [""]
    return lines[-1] if lines[0].startswith("Caught ") else f"{type(error).__name__}: {lines[0]}"
