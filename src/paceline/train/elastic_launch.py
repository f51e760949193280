"""Starts the local workers of ``paceline train --elastic``, and lets the run go on without those that are lost.

This process outlives them all: it keeps the store that they meet in, writes the record, and starts others in place of
the lost.
"""

from __future__ import annotations

import os
import statistics
import time
from collections import deque
from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

from paceline.errors import PacelineError, WorkerError
from paceline.runs import Recorder
from paceline.torch.elastic.generation import Where
from paceline.torch.elastic.keeper import Keeper, Loss
from paceline.torch.elastic.member import Mended
from paceline.torch.measuring.open_rounds import RoundResult
from paceline.torch.measuring.recorder import RoundRecorder
from paceline.train import launch
from paceline.train import workers as common
from paceline.train.config import TrainConfig

LOOK = 0.005  # seconds between two looks at the workers
RECENT = 20  # rounds, whose median is what one usually takes


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
    Raises PacelineError for what a worker found wrong with its input, WorkerError when none is left.
    """
    context = common.context()
    life, held = context.Pipe(duplex=False)
    story = _Story(config, run_dir, on_event, resume)

    def start(where: Where) -> _Local:
        ours, theirs = context.Pipe(duplex=False)
        arguments = (config, run_dir, resume, where, theirs, life)
        with common.environment(OMP_NUM_THREADS="1", GLOO_SOCKET_IFNAME="lo"):
            process = context.Process(target=_work, args=arguments, name=f"worker {where.place}")
            process.start()
        theirs.close()
        return _Local(process, ours, where.place)

    keeper = Keeper(config.workers, start, config.max_restarts, config.dead_after, port)
    try:
        while keeper.workers:
            if interrupted():
                raise KeyboardInterrupt
            workers = list(keeper.workers.values())
            losses = keeper.look()
            for worker in workers:
                for event in worker.said():  # type: ignore[attr-defined]
                    story.take(event, worker.place)  # type: ignore[attr-defined]
            story.lost(losses, keeper.running)
            time.sleep(LOOK)
        return story.end()
    finally:
        held.close()
        life.close()
        story.close()
        keeper.close()


class _Local:
    """A worker process, and what it says."""

    def __init__(self, process: ForkServerProcess, pipe: Connection, place: int) -> None:
        self._process, self._pipe, self.place = process, pipe, place

    def status(self) -> int | None:
        return None if self._process.is_alive() else self._process.exitcode or 0

    def kill(self) -> None:
        self._process.kill()

    def leave(self) -> None:
        self._process.terminate()

    def said(self) -> list[dict[str, Any]]:
        """Since the last call."""
        events = []
        try:
            while self._pipe.poll():
                events.append(self._pipe.recv())
        except (EOFError, OSError):
            pass  # it has ended
        return events


class _Story:
    """What happens, told to the user and the record: each round once, with who was lost in it and came back."""

    def __init__(
        self, config: TrainConfig, run_dir: Path, on_event: Callable[[dict[str, Any]], None], resume: bool
    ) -> None:
        self._config, self._run_dir, self._tell, self._resume = config, run_dir, on_event, resume
        self._record: RoundRecorder | None = None
        self._newest, self._generation = -1, -1
        self._members: tuple[int, ...] = ()
        self._usual: deque[float] = deque(maxlen=RECENT)
        self._pending: list[Loss] = []  # seen by the launcher, and not yet by the members
        self._events: dict[int, list[str]] = {}  # by round
        self._complaint = ""
        self._accuracy: float | None = None
        self._began = False
        self.faults = 0

    def take(self, event: dict[str, Any], place: int) -> None:
        """What the worker of this place says. Raises PacelineError for what is wrong with the input."""
        kind = event["type"]
        if kind == "start":
            if not self._began:
                self._began = True
                facts = self._config.as_dict() | {"engine": "torch"}
                keep = event["first"] if self._resume else None
                self._record = RoundRecorder(Recorder.create(self._run_dir, facts, resume=keep))
                self._tell(event)
        elif kind == "round":
            self._round(event)
        elif kind == "members":
            self._changed(event["mended"])
        elif kind == "judged":
            self._accuracy = event["accuracy"]
        elif kind == "input":
            raise PacelineError(event["message"])
        elif kind == "fault":
            self._complaint = f"worker {place} failed: {event['message']}"
            self._tell({"type": "note", "text": self._complaint})
        else:
            self._tell(event)

    def lost(self, losses: list[Loss], running: bool) -> None:
        """Workers take part no more. Raises WorkerError where the run cannot begin without one."""
        for loss in losses:
            if loss.lost and not running:
                wrong = self._complaint or f"worker {loss.place} {loss.words} before the first round"
                raise WorkerError(f"{wrong}; {launch.how_to_go_on(self._run_dir)}")
            if loss.lost or loss.words == "left":
                self._pending.append(loss)

    def end(self) -> dict[str, Any]:
        """The summary. Raises WorkerError where nobody came to the end."""
        if self._accuracy is None or self._record is None:
            last = "; ".join(f"worker {loss.place} {loss.words}" for loss in self._pending[-3:])
            raise WorkerError(
                f"no worker is left after round {self._newest} ({self._complaint or last or 'all have ended'}); "
                f"{launch.how_to_go_on(self._run_dir)}"
            )
        return self._record.close(
            test_accuracy=self._accuracy, run_dir=str(self._run_dir), workers_lost=self.faults
        )

    def close(self) -> None:
        """Leave the record whole."""
        if self._record is not None:
            self._record.recorder.close()

    def _changed(self, mended: Mended) -> None:
        """The members have changed, as the first of them tells."""
        if mended.generation <= self._generation:
            return
        before, self._members, self._generation = self._members, mended.members, mended.generation
        told = self._events.setdefault(mended.step, [])
        for loss in self._pending:
            self.faults += loss.lost
            told.append(f"worker {loss.place} {loss.words}")
        self._pending = []
        if before:
            told += [f"worker {place} joined" for place in mended.members if place not in before]

    def _round(self, event: dict[str, Any]) -> None:
        result: RoundResult = event.pop("result")
        if result.step <= self._newest or self._record is None:
            return
        self._newest = result.step
        # A worker that was lost later may have told of a round that the others were still to mend.
        told = [step for step in self._events if step <= result.step]
        said = [words for step in sorted(told) for words in self._events.pop(step)]
        usual = statistics.median(self._usual) if self._usual else result.seconds
        late = max(result.seconds - usual, 0.0)
        if said:
            for words in said:
                self._tell({"type": "note", "text": _sentence(words, result, late)})
        else:
            self._usual.append(result.seconds)
        events = [{"what": words, "seconds_lost": round(late, 4)} for words in said]
        self._record.round(result, events)
        self._tell(event)


def _sentence(words: str, result: RoundResult, late: float) -> str:
    """What happened in a round, for people."""
    if words.endswith("joined"):
        return f"{words} at round {result.step}"
    ran = ", ".join(str(place) for place, load in enumerate(result.loads.tolist()) if load)
    return (
        f"{words} in round {result.step}; {late:.2f} s lost; no sample lost: the round's {result.batch} were run by "
        f"worker {ran}"
    )


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
        train(config, run_dir, pipe.send, resume, company())
    except SystemExit:
        pass  # it has left on purpose
    except PacelineError as error:
        pipe.send({"type": "fault" if isinstance(error, WorkerError) else "input", "message": str(error)})
        status = 2
    except Exception as error:  # whatever it is, the others go on without this worker
        pipe.send({"type": "fault", "message": launch.words(error)})
        status = 1
    pipe.close()
    os._exit(status)  # threads of gloo may still wait for a lost rank
