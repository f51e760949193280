"""Starts the local workers of ``paceline train``, and lets the run go on without those that are lost.

This process outlives them all: it keeps the store that they meet in, writes the record, and starts others in place of
the lost.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from contextlib import closing
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

from paceline.errors import PacelineError, WorkerError
from paceline.torch.elastic.membership import Where
from paceline.torch.elastic.supervisor import Supervisor
from paceline.train import launch
from paceline.train import workers as common
from paceline.train.config import TrainConfig
from paceline.train.stopped import Stopped
from paceline.train.story import Story

LOOK = 0.02  # seconds between two looks at the workers, at most: the end of one is seen at once
STOPPED_LOOK = 0.5  # the same, for one that is stopped before it gives signs of life


def run(
    config: TrainConfig,
    run_dir: Path,
    on_event: Callable[[dict[str, Any]], None],
    resume: bool = False,
    port: int = 0,
    interrupted: Callable[[], bool] = lambda: False,
) -> dict[str, Any]:
    """Train on ``config.workers`` local processes, some of which may be lost; returns the summary.

    port: where the workers meet; 0 takes any free one. interrupted: whether the user has asked for the end.
    on_event: takes ``{"type": "starting", "ready": ..., "workers": ...}`` as workers come, then what happens.
    Raises PacelineError for what a worker found wrong with its input, WorkerError when one has failed by an error of
    its own, when one was lost before the first round, or when none is left.
    """
    context = common.context()
    life, held = context.Pipe(duplex=False)
    locals_: dict[int, _Local] = {}

    def start(where: Where) -> _Local:
        ours, theirs = context.Pipe(duplex=False)
        arguments = (config, run_dir, resume, where, theirs, life)
        with common.environment(OMP_NUM_THREADS="1", GLOO_SOCKET_IFNAME="lo"):
            process = context.Process(target=_work, args=arguments, name=f"worker {where.place}")
            process.start()
        theirs.close()
        locals_[where.ident] = _Local(process, ours)
        return locals_[where.ident]

    with closing(Story(config, run_dir, on_event, resume)) as story:
        try:
            on_event({"type": "starting", "ready": 0, "workers": config.workers})
            keeper = Supervisor(config.workers, start, config.max_restarts, config.dead_after, port)
            _watch(keeper, locals_, story, config, run_dir, interrupted)
            return story.end()
        finally:
            held.close()
            life.close()
            for worker in locals_.values():
                worker.kill()
            for worker in locals_.values():
                worker.join()


def _watch(
    keeper: Supervisor,
    locals_: dict[int, _Local],
    story: Story,
    config: TrainConfig,
    run_dir: Path,
    interrupted: Callable[[], bool],
) -> None:
    """Until the last worker has ended."""
    stopped = Stopped({ident: worker.pid for ident, worker in locals_.items()}, config.patience)
    looked = time.monotonic()
    while keeper.workers:
        if interrupted():
            raise KeyboardInterrupt
        if not keeper.running and time.monotonic() - looked >= STOPPED_LOOK:
            looked = time.monotonic()
            stopped.look(f"the run was ended; {launch.how_to_go_on(run_dir)}")
        talking = list(locals_.items())
        losses = keeper.look()
        story.lost(losses)
        for ident, worker in talking:
            for event in worker.said():
                story.take(event, ident)
        if story.judging:  # which is once, after the last round: whoever joined would have nothing to do
            keeper.restarts = 0
        if not story.judged and (not keeper.workers or any(loss.failed for loss in losses)):
            time.sleep(launch.SIGNAL_SECONDS)  # a signal that ended them may have been meant for all
            if interrupted():
                raise KeyboardInterrupt
        story.settle([member.ident for member in keeper.membership.members], losses, keeper.running)
        wait([locals_[ident].sentinel for ident in keeper.workers], LOOK)


class _Local:
    """A worker process, and what it says."""

    def __init__(self, process: ForkServerProcess, pipe: Connection) -> None:
        assert process.pid is not None
        self._process, self._pipe, self.pid = process, pipe, process.pid

    def status(self) -> int | None:
        return None if self._process.is_alive() else self._process.exitcode or 0

    def kill(self) -> None:
        self._process.kill()

    def leave(self) -> None:
        self._process.terminate()

    @property
    def sentinel(self) -> int:
        """Readable as soon as the process has ended."""
        return self._process.sentinel

    def join(self) -> None:
        """Until it is dead."""
        self._process.join()
        self._pipe.close()

    def said(self) -> list[dict[str, Any]]:
        """Since the last call."""
        events = []
        try:
            while self._pipe.poll():
                events.append(self._pipe.recv())
        except (EOFError, OSError):
            pass  # it has ended
        return events


def _work(
    config: TrainConfig, run_dir: Path, resume: bool, where: Where, pipe: Connection, life: Connection
) -> None:
    """A worker's life."""
    common.begin(life, ("SIGINT", "SIGHUP"))
    os.environ.update(where.environment())
    from paceline.torch.elastic.link import company
    from paceline.train.elastic_engine import train

    status = 0
    try:
        pipe.send({"type": "ready"})
        train(config, run_dir, pipe.send, resume, company())
    except SystemExit:
        pass  # it has left on purpose
    except PacelineError as error:
        pipe.send({"type": "fault" if isinstance(error, WorkerError) else "input", "message": str(error)})
        status = 2
    except Exception as error:
        pipe.send({"type": "fault", "message": launch.words(error)})
        if common.lost_its_loader(error):
            os.kill(os.getpid(), signal.SIGKILL)  # which is no error of its own, and the others go on
        status = 1
    pipe.close()
    os._exit(status)  # threads of gloo may still wait for a lost rank
