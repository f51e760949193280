"""Starts the local workers of ``paceline train``, watches them, and ends them together.

The workers are forked from a small server that has PyTorch loaded, so many start quickly. Each sends its events over
its own pipe to this process, which outlives the workers and records the events. Another pipe is open as long as this
process lives: workers end when it closes, so that none is left behind if this process is killed.

If the run survives the loss of a worker, ``Supervisor`` replaces lost workers. Else the workers are the ranks of a
process group and do not join the supervisor's rendezvous. To it, the run has never begun, so the first loss ends it.
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
from paceline.torch.elastic.messages import Where
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
LOOK = 0.02  # seconds between two looks at the workers, at most: the end of a worker is seen at once
STOPPED_LOOK = 0.5  # seconds between two checks whether a worker is stopped
SIGNAL_SECONDS = 0.3  # within which a signal to the whole group, which ended a worker, also arrives here
REASON_SECONDS = 1.0  # before a failed worker ends, so that the cause of its failure is noticed first
TIMEOUT = timedelta(seconds=600)

OnEvent = Callable[[dict[str, Any]], None]


def run(
    config: TrainConfig,
    run_dir: Path,
    on_event: OnEvent,
    resume: bool = False,
    port: int = 0,
    interrupted: Callable[[], bool] = lambda: False,
) -> dict[str, Any]:
    """Train on ``config.workers`` local processes; returns the summary.

    port: of the rendezvous; 0 takes any free one. interrupted: whether the user has asked for the end.
    on_event: takes ``{"type": "starting", "ready": ..., "workers": ...}`` as workers start, then the run's events.
    Raises PacelineError for an error in a worker's input, WorkerError if a worker has failed by its own error, if a
    worker was lost that the run needs, or if none is left.
    """
    context, lasting = multiprocessing.get_context("forkserver"), survives(config)
    context.set_forkserver_preload(LOADED)
    resource_tracker.ensure_running()  # before the block, since it unblocks SIGINT
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])  # else the server prints a traceback
    try:
        forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
    ended, held = context.Pipe(duplex=False)
    workers: dict[int, _Local] = {}

    def start(where: Where) -> _Local:
        ours, theirs = context.Pipe(duplex=False)
        arguments = (config, run_dir, resume, lasting, where, theirs, ended)
        worker = _Local(target=_work, args=arguments, name=f"worker {where.place}")
        try:
            worker.start()
        except (EOFError, ConnectionError) as error:
            raise WorkerError(_unforked(run_dir)) from error
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
                if interrupted():  # the exception was lost, for example while an object was destroyed
                    raise KeyboardInterrupt
                if not supervisor.running and stopped.due(now := time.monotonic()):
                    check_stopped(stopped, workers, now, f"the run was ended; {how_to_go_on(run_dir)}")
                talking = list(workers.items())
                losses = supervisor.look()
                if any(worker.exitcode == UNKNOWN for worker in workers.values()):
                    raise WorkerError(_unforked(run_dir))
                if lasting and not supervisor.running:  # the run needs all workers to begin
                    losses = [loss._replace(lost=True) for loss in losses]
                journal.lost(losses)
                for ident, worker in talking:
                    for event in worker.events():
                        journal.take(event, ident)
                if journal.over:  # a new worker would have nothing to do
                    supervisor.restarts = 0
                fatal = any(loss.failed or (loss.lost and not supervisor.running) for loss in losses)
                if not journal.over and (fatal or not supervisor.workers):
                    time.sleep(SIGNAL_SECONDS)
                    if interrupted():
                        raise KeyboardInterrupt
                ours = [each.ident for each in supervisor.members] if lasting else [0]
                journal.settle(ours, losses, supervisor.running)
                wait([workers[ident].sentinel for ident in supervisor.workers], LOOK)
            return journal.end()
        finally:
            held.close()
            ended.close()
            for worker in workers.values():
                worker.kill()
            for worker in workers.values():
                worker.join()
                worker.pipe.close()


def _unforked(run_dir: Path) -> str:
    """A message that the process from which workers are forked has ended."""
    return (
        "the process that starts the workers was killed, perhaps for lack of memory, and the workers were ended; "
        f"{how_to_go_on(run_dir)}"
    )


def join(config: TrainConfig, run_dir: Path, on_event: OnEvent, resume: bool = False) -> dict[str, Any]:
    """Train as one of the ranks that another launcher, such as torchrun, has started; returns the summary, which is
    empty on all ranks but the first."""
    with closing(Journal(config, run_dir, on_event, resume)) as journal:

        def emit(event: dict[str, Any]) -> None:
            journal.take(event, 0)
            journal.settle([0], (), False)

        engine.train(config, run_dir, emit, resume, missed="end")
        return journal.end() if journal.over else {}


# The exit status of a worker whose fork server has ended, which alone knows it; ``_work`` ends with another.
UNKNOWN = 255


class _Local(ForkServerProcess):
    """A worker process. pipe: the connection for its events, which is set after the start."""

    pipe: Connection

    def poll(self) -> int | None:
        return self.exitcode

    def events(self) -> list[dict[str, Any]]:
        """The events since the last call. This does not wait for the pipe's end: a loader's process may hold the pipe
        open after its worker's death."""
        events = []
        with suppress(EOFError, OSError):  # the worker has ended
            while self.pipe.poll():
                events.append(self.pipe.recv())
        return events


def check_stopped(
    detector: FailureDetector, workers: Mapping[int, WorkerProcess], now: float, advice: str
) -> None:
    """Check from outside whether workers are stopped, for example by SIGSTOP, in any phase of the run.

    Raises WorkerError, with ``advice`` at its end, for a worker that is therefore silent for ``detector``."""
    signs = {rank: None if _stopped(worker.pid) else now for rank, worker in workers.items()}
    for rank, seconds in detector.silent(now, signs).items():
        raise WorkerError(f"worker {rank} has been stopped, as by SIGSTOP, for {seconds:.0f} s; {advice}")


def _stopped(pid: int | None) -> bool:
    """Whether a process is stopped; False for one that has ended, which is noticed elsewhere."""
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
    ended: Connection,
) -> None:
    """Run a worker, in its process. lasting: whether the run survives its loss. ended: readable as soon as the
    command has ended."""
    # A signal such as Ctrl-C reaches the whole process group: the command gets it too, and ends the worker in order.
    for number in (signal.SIGINT, signal.SIGHUP, *(() if lasting else (signal.SIGTERM,))):
        signal.signal(number, signal.SIG_IGN)
    end_with(ended)
    for name, value in (("OMP_NUM_THREADS", "1"), ("GLOO_SOCKET_IFNAME", "lo")):
        os.environ.setdefault(name, value)
    torch.set_num_threads(1)
    # Loader processes are forked from their worker, as in a program of one rank. Otherwise each worker starts a fork
    # server for them, which must load PyTorch first, and names of semaphores outlive a worker that ends at once.
    multiprocessing.set_start_method("fork", force=True)

    def send(event: dict[str, Any]) -> None:
        try:
            pipe.send(event)
        except BrokenPipeError:  # the command has ended, and this process was to end, too
            os._exit(1)

    def missed(missing: Missing) -> None:
        """End the process: nothing else frees a thread in a reduction, and the record and checkpoint are complete."""
        send({"type": "missed", "message": missing.words})
        os._exit(1)

    status = 0
    try:
        send({"type": "ready"})
        if lasting:
            os.environ.update(where.environment())
        else:
            store = dist.TCPStore(where.host, where.port, None, False, TIMEOUT, wait_for_workers=False)
            ranks: dict[str, Any] = {"rank": where.place, "world_size": where.places}
            dist.init_process_group("gloo", store=store, timeout=TIMEOUT, **ranks)
        engine.train(config, run_dir, send, resume, lasting, missed)
    except SystemExit:
        pass  # the worker has left on purpose
    except PacelineError as error:
        send({"type": "fault" if isinstance(error, WorkerError) else "input", "message": str(error)})
        status = 2
    except Exception as error:
        if lasting and _loader_killed(error):
            send({"type": "fault", "message": f"a process of its loader was killed ({_words(error)})"})
            os.kill(os.getpid(), signal.SIGKILL)  # a loss and not an error, so the others continue
        send({"type": "fault", "message": _words(error)})
        status = 1
    if status and not lasting:
        time.sleep(REASON_SECONDS)
    pipe.close()
    os._exit(status)  # threads of gloo may still wait for a lost rank


def _loader_killed(error: Exception) -> bool:
    """Whether a process of this worker's loader was killed, for example for lack of memory: torch says so, or, if it
    was just handing over a batch, the connection to it ends. An error that such a process itself raises has the same
    type here, and words that begin with "Caught"."""
    said = str(error)
    ends = isinstance(error, ConnectionError | EOFError) and not said.startswith("Caught ")
    return ends or (isinstance(error, RuntimeError) and said.startswith("DataLoader worker (pid"))


def _words(error: Exception) -> str:
    """An error in one line. For an error in a loader's process, torch passes the traceback, which ends with it."""
    lines = str(error).strip().splitlines() or [""]
    return lines[-1] if lines[0].startswith("Caught ") else f"{type(error).__name__}: {lines[0]}"
