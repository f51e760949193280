"""Starts the local workers of ``paceline train``, watches them, and ends them together.

The workers are forked from a small server that has PyTorch loaded, so many start quickly. Each tells what it does
over a pipe of its own, and this process, which outlives them, puts it on record. Another pipe is open for as long as
this process lives: a worker ends when it closes, so that none is left behind whatever becomes of this process.

If the run survives the loss of a worker, ``Supervisor`` starts others in their place. Else the workers are a process
group, do not meet in its store, and count as one that has not begun: the first loss is the end.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Mapping
from contextlib import closing, suppress
from datetime import timedelta
from multiprocessing import forkserver, resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist

from paceline.errors import PacelineError, WorkerError
from paceline.torch.elastic.membership import Where
from paceline.torch.elastic.nodes import WorkerProcess
from paceline.torch.elastic.supervisor import Supervisor
from paceline.torch.liveness.detector import FailureDetector
from paceline.torch.liveness.shutdown import end_with
from paceline.torch.liveness.stall import Missing
from paceline.train import engine
from paceline.train.checks import survives
from paceline.train.config import TrainConfig
from paceline.train.journal import Journal, how_to_go_on

LOADED = ["torch", "torch.distributed", "torch._dynamo", "paceline.train.launch", "paceline.train.forked"]
LOOK = 0.02  # seconds between two looks at the workers, at most: the end of one is seen at once
STOPPED_LOOK = 0.5  # the same, at whether one is stopped
SIGNAL_SECONDS = 0.3  # a signal that ended a worker may have been meant for all: it gets here within them
REASON_SECONDS = 1.0  # for the worker that is the reason why another fails to be noticed first
TIMEOUT = timedelta(seconds=600)

Told = Callable[[dict[str, Any]], None]


def run(
    config: TrainConfig,
    run_dir: Path,
    on_event: Told,
    resume: bool = False,
    port: int = 0,
    interrupted: Callable[[], bool] = lambda: False,
) -> dict[str, Any]:
    """Train on ``config.workers`` local processes; returns the summary.

    port: where the workers meet; 0 takes any free one. interrupted: whether the user has asked for the end.
    on_event: takes ``{"type": "starting", "ready": ..., "workers": ...}`` as workers come, then what happens.
    Raises PacelineError for what a worker found wrong with its input, WorkerError when one has failed by an error of
    its own, when one was lost that the run needs, or when none is left.
    """
    context, lasting = multiprocessing.get_context("forkserver"), survives(config)
    context.set_forkserver_preload(LOADED)  # processes are forked from a small server that has PyTorch loaded
    resource_tracker.ensure_running()  # before, since it lets SIGINT through again
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])  # else the server tells a traceback
    try:
        forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
    life, held = context.Pipe(duplex=False)
    workers: dict[int, _Local] = {}

    def start(where: Where) -> _Local:
        ours, theirs = context.Pipe(duplex=False)
        arguments = (config, run_dir, resume, lasting, where, theirs, life)
        worker = _Local(target=_work, args=arguments, name=f"worker {where.place}")
        worker.start()
        worker.pipe = ours
        theirs.close()
        workers[where.ident] = worker
        return worker

    with closing(Journal(config, run_dir, on_event, resume)) as journal:
        try:
            on_event({"type": "starting", "ready": 0, "workers": config.workers})
            supervisor = Supervisor(config.workers, start, config.max_restarts, config.dead_after, port)
            stopped = FailureDetector(config.patience, STOPPED_LOOK)
            while supervisor.workers:
                if interrupted():  # and the exception was lost, as in an object's destruction
                    raise KeyboardInterrupt
                if not supervisor.running and stopped.due(now := time.monotonic()):
                    check_stopped(stopped, workers, now, f"the run was ended; {how_to_go_on(run_dir)}")
                talking = list(workers.items())
                losses = supervisor.look()
                if lasting and not supervisor.running:  # all are needed to begin
                    losses = [loss._replace(lost=True) for loss in losses]
                journal.lost(losses)
                for ident, worker in talking:
                    for event in worker.said():
                        journal.take(event, ident)
                if journal.over:  # the last round: whoever joined would have nothing to do
                    supervisor.restarts = 0
                fatal = any(loss.failed or (loss.lost and not supervisor.running) for loss in losses)
                if not journal.over and (fatal or not supervisor.workers):
                    time.sleep(SIGNAL_SECONDS)  # a signal that ended them may have been meant for all
                    if interrupted():
                        raise KeyboardInterrupt
                ours = [each.ident for each in supervisor.members] if lasting else [0]
                journal.settle(ours, losses, supervisor.running)
                wait([workers[ident].sentinel for ident in supervisor.workers], LOOK)
            return journal.end()
        finally:
            held.close()
            life.close()
            for worker in workers.values():
                worker.kill()
            for worker in workers.values():
                worker.join()
                worker.pipe.close()


def join(config: TrainConfig, run_dir: Path, on_event: Told, resume: bool = False) -> dict[str, Any]:
    """Train as one of the ranks that another launcher has started, such as torchrun; the summary, empty on all ranks
    but the first."""
    with closing(Journal(config, run_dir, on_event, resume)) as journal:

        def emit(event: dict[str, Any]) -> None:
            journal.take(event, 0)
            journal.settle([0], (), False)

        engine.train(config, run_dir, emit, resume, missed="end")
        return journal.end() if journal.over else {}


class _Local(ForkServerProcess):
    """A worker process, and what it says. pipe: where it says that; set when it was started."""

    pipe: Connection

    def poll(self) -> int | None:
        return self.exitcode

    def said(self) -> list[dict[str, Any]]:
        """Since the last call. A loader's child may hold the pipe open after its worker's death: its end is not
        waited for."""
        events = []
        with suppress(EOFError, OSError):  # it has ended
            while self.pipe.poll():
                events.append(self.pipe.recv())
        return events


def check_stopped(
    detector: FailureDetector, workers: Mapping[int, WorkerProcess], now: float, advice: str
) -> None:
    """See from outside whether workers are stopped, as by SIGSTOP, at any moment of their lives.

    Raises WorkerError, with ``advice`` at its end, for one that has been so for as long as makes it silent."""
    signs = {rank: None if _stands(worker.pid) else now for rank, worker in workers.items()}
    for rank, seconds in detector.silent(now, signs).items():
        raise WorkerError(f"worker {rank} has been stopped, as by SIGSTOP, for {seconds:.0f} s; {advice}")


def _stands(pid: int | None) -> bool:
    """Whether a process is stopped; one that has ended is not, which others see."""
    with suppress(psutil.Error):
        return bool(psutil.Process(pid).status() == psutil.STATUS_STOPPED)
    return False


def _work(
    config: TrainConfig,
    run_dir: Path,
    resume: bool,
    lasting: bool,
    where: Where,
    pipe: Connection,
    life: Connection,
) -> None:
    """A worker's life.

    lasting: whether the run survives its loss. life: readable as soon as the command has ended.
    """
    # These may reach the whole group, as Ctrl-C does: the command, which they reach too, ends the worker in order.
    for number in (signal.SIGINT, signal.SIGHUP, *(() if lasting else (signal.SIGTERM,))):
        signal.signal(number, signal.SIG_IGN)
    end_with(life)
    for name, value in (("OMP_NUM_THREADS", "1"), ("GLOO_SOCKET_IFNAME", "lo")):
        os.environ.setdefault(name, value)
    torch.set_num_threads(1)
    # Loaders' processes are forked from their worker, as in a program of one rank; otherwise each worker starts a
    # server of its own for them, which has PyTorch to load first, and the names of semaphores outlive a worker that
    # ends at once.
    multiprocessing.set_start_method("fork", force=True)

    def missed(missing: Missing) -> None:
        """Nothing but an end frees a thread that waits in a reduction; the record and the checkpoint are whole."""
        pipe.send({"type": "missed", "message": missing.words})
        os._exit(1)

    status = 0
    try:
        pipe.send({"type": "ready"})
        if lasting:
            os.environ.update(where.environment())
        else:
            store = dist.TCPStore(where.host, where.port, None, False, TIMEOUT, wait_for_workers=False)
            ranks: dict[str, Any] = {"rank": where.place, "world_size": where.places}
            dist.init_process_group("gloo", store=store, timeout=TIMEOUT, **ranks)
        engine.train(config, run_dir, pipe.send, resume, lasting, missed)
    except SystemExit:
        pass  # it has left on purpose
    except PacelineError as error:
        pipe.send({"type": "fault" if isinstance(error, WorkerError) else "input", "message": str(error)})
        status = 2
    except Exception as error:
        pipe.send({"type": "fault", "message": _words(error)})
        # What torch raises in a worker one of whose loader's processes was killed, as where memory is short; what
        # such a process itself raises begins with other words.
        if lasting and isinstance(error, RuntimeError) and str(error).startswith("DataLoader worker (pid"):
            os.kill(os.getpid(), signal.SIGKILL)  # which is no error of its own, and the others go on
        status = 1
    if status and not lasting:
        time.sleep(REASON_SECONDS)
    pipe.close()
    os._exit(status)  # threads of gloo may still wait for a lost rank


def _words(error: Exception) -> str:
    """An error in one line; of one in a loader's process, torch hands on the traceback, which ends with the error."""
    lines = str(error).strip().splitlines() or [""]
    return lines[-1] if lines[0].startswith("Caught ") else f"{type(error).__name__}: {lines[0]}"
