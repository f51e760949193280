"""All jobs: the running ones, and those that cannot continue and are set aside.

The stored state of a job that is set aside is kept. The log and the API name the job, and all other jobs run.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

import paceline
from paceline import runs
from paceline.errors import PacelineError, saying
from paceline.files import sweep
from paceline.rounds import RoundResult
from paceline.runs.run import CONFIG
from paceline.serve import events
from paceline.serve.events import Conflict, NotFound, SetAside
from paceline.serve.jobs import Job
from paceline.serve.models import JobState, Settings, WorkerState
from paceline.serve.store import Store, StoredJob

MOST_JOBS = 100
# Bucket edges, in seconds, of the histograms of answers and rounds.
SPANS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
LATELY = 40  # recent rounds behind the rates on the page of all jobs
_log = logging.getLogger(__name__)


class JobRuntime:
    """A job as it is stored, and what the service needs around it. Raises PacelineError, with the reason, if the
    stored job cannot continue.
    """

    def __init__(self, kept: StoredJob) -> None:
        self.name = kept.name
        self.record: JobRecord | None = None
        self.news = asyncio.Event()  # wakes requests that wait for a plan
        self.complaint = ""  # the last complaint about the job in the service's log
        self.behind = self.go_back(kept)  # rounds that closed in the calls
        self.written_by = kept.version or paceline.__version__
        self.lately: deque[RoundResult] = deque(self.behind, LATELY)
        # Histogram of the seconds of rounds since the service started, and the sum of these seconds.
        self.spans, self.spent = np.zeros(len(SPANS) + 1, np.int64), 0.0

    def go_back(self, kept: StoredJob) -> list[RoundResult]:
        """Restore the job as it is stored; returns the rounds that closed in its logged calls."""
        if kept.wrong:
            raise PacelineError(kept.wrong)
        self.job = Job(Settings.stored(kept.settings))
        self.newest = 0.0  # the time of the newest call
        self.write: asyncio.Future[Any] | None = None  # the write of the newest call
        self.logged = self.done = self.stored = kept.through  # newest call handled, on disk, in the state
        self.last_closed = kept.through  # newest call that has closed a round
        behind: list[RoundResult] = []
        if kept.state is not None:
            try:
                self.newest = float(kept.state["now"])
                self.job.load_state_dict(kept.state["job"])
            except Exception as error:
                raise PacelineError(f"its state cannot be used ({_in_words(error)})") from error
        self.first = next(iter(self.job.open), self.job.settled)  # round that closes next
        for number, call in enumerate(kept.calls, kept.through + 1):
            try:
                event = events.read(call)
                effects = self.job.handle(event)
                self.newest = float(event.now)
            except Exception as error:
                raise PacelineError(
                    f"call {number} of its log cannot be replayed ({_in_words(error)})"
                ) from error
            self.logged = self.done = number
            behind += [each for each in effects if isinstance(each, RoundResult)]
        return behind

    async def on_disk(self) -> None:
        """Wait until all changes of the job are stored. Raises NotStored if that failed."""
        if self.write is not None:
            await asyncio.shield(self.write)

    def state(self) -> JobState:
        """The state of the job and of its workers, for the API."""
        job = self.job
        never = dict.fromkeys(("round", "samples", "seconds"))
        workers = [
            WorkerState(**vars(each), present=each.present, **(each.last._asdict() if each.last else never))
            for each in sorted(job.members.by_name.values(), key=lambda member: member.place)
        ]
        return JobState(
            name=self.name,
            settings=job.settings,
            rounds=job.closed,
            reports=job.reports,
            samples=job.samples,
            dropped=job.drops,
            present=job.members.count,
            waiting=job.waiting_for(),
            deadline=job.limit(),
            record="no record kept" if self.record is None else self.record.error or str(self.record.run_dir),
            workers=workers,
        )

    def wake(self) -> None:
        """Let requests that wait for a plan check again."""
        self.news.set()
        self.news = asyncio.Event()


class JobRecord:
    """The rounds of a job as a run directory, which ``paceline report`` and the live page read; one thread at a time
    appends to it. A failure ends the record, not the job: see ``error``."""

    def __init__(self, run_dir: Path, name: str, settings: Settings) -> None:
        self.run_dir, self.error = run_dir, ""
        self._config = {"engine": "service", "job": name, "workers": settings.workers} | {
            "global_batch": settings.batch,
            "policy": settings.policy,
            "settings": settings.model_dump(),
        }
        self._recorder: runs.Recorder | None = None
        self._origin: float | None = None  # the job's time at which this part of the record starts
        self._next = 0  # rounds before this one are written
        self._names: list[str | None] | None = None  # as this part of the record has them

    def open(self, first: int, settled: int) -> None:
        """Start or continue the record; an existing record of another job, or one that lacks rounds, is moved aside.

        first: the round that will be written first. settled: the job's number of settled rounds.
        """
        with self._trying(), saying(f"cannot rename {self.run_dir}", "rename it by hand"):
            resume = None
            if (self.run_dir / CONFIG).exists():
                sweep(self.run_dir)
                before = runs.read(self.run_dir)
                written = int(before.round[-1]) + 1 if len(before.round) else 0
                mine = before.config.get("settings") == self._config["settings"]
                if written > settled or written < first or not mine:
                    # No job's name contains "~".
                    aside = (self.run_dir.with_name(f"{self.run_dir.name}~{n}") for n in itertools.count(1))
                    self.run_dir.rename(next(path for path in aside if not path.exists()))
                else:
                    resume = self._next = written
            self._recorder = runs.Recorder.create(self.run_dir, self._config, resume)

    def write(self, closed: RoundResult, names: list[str | None]) -> None:
        """Write one round, unless it was already written before a restart. names: of the workers, by place."""
        if self._recorder is None or closed.step < self._next:
            return
        if self._origin is None:
            self._origin = closed.ended - closed.seconds
        known = not np.isnan(closed.shares).any()
        news: dict[str, Any] = {} if names == self._names else {"names": names}
        with self._trying():
            self._recorder.round(
                round=closed.step,
                epoch=0,
                time=round(closed.ended - self._origin, 6),
                seconds=round(closed.seconds, 6),
                batch=closed.batch,
                loads=[None if load != load else int(load) for load in closed.loads.tolist()],
                compute=np.round(closed.compute, 9),
                overhead=np.where(np.isnan(closed.compute), np.nan, np.round(closed.overhead, 9)),
                shares=np.round(closed.shares, 9) if known else None,
                **news,
            )
            self._next, self._names = closed.step + 1, names

    def finish(self) -> None:
        """Write the summary, when no worker is left."""
        if self._recorder is not None and self._next:
            with self._trying():
                self._recorder.finish()

    def close(self) -> None:
        """End the record."""
        recorder, self._recorder = self._recorder, None
        if recorder is not None:
            try:
                recorder.close()
            except OSError as full:
                self.error = self.error or str(full)

    @contextlib.contextmanager
    def _trying(self) -> Iterator[None]:
        try:
            yield
        except PacelineError as error:
            self.error = str(error)
            self.close()


class Catalog:
    """All jobs as they are on disk, by name.

    runs: the folder of the jobs' run directories; None if no records are kept.
    """

    def __init__(self, store: Store, runs: Path | None) -> None:
        self._store, self._runs = store, runs
        self.running: dict[str, JobRuntime] = {}
        self.aside: dict[str, str] = {}  # jobs set aside, with the reason
        self.unresumed: list[JobRuntime] = []  # jobs that ran before this service started
        for kept in store.read():
            try:
                runtime = JobRuntime(kept)
            except PacelineError as error:
                _log.debug("job %r cannot continue", kept.name, exc_info=error)
                self.set_aside(kept.name, kept.version, str(error))
                continue
            self.running[kept.name] = runtime
            other = runtime.written_by != paceline.__version__
            if runtime.logged or other:
                self.unresumed.append(runtime)
            self.open_record(runtime)
            if other:
                _log.warning(
                    "job %r was written by version %s, and this service is version %s: rounds that were handed out "
                    "keep their plans, and the next plans follow the rules of this version",
                    kept.name,
                    kept.version,
                    paceline.__version__,
                )

    def read_again(self, runtime: JobRuntime) -> None:
        """Restore the job from the disk, after its latest changes could not be stored."""
        try:
            (kept,) = self._store.read(runtime.name)
            runtime.go_back(kept)
        except (PacelineError, ValueError) as error:
            self.set_aside(runtime.name, paceline.__version__, f"it could not be read again ({error})")

    def find(self, name: str) -> JobRuntime:
        """The running job of this name. Raises NotFound or SetAside."""
        if name in self.aside:
            raise SetAside(self.aside[name])
        if name not in self.running:
            known = ", ".join(list(self.running)[:5]) or "none"
            raise NotFound(f"job {name!r} is unknown here: create it first (known jobs: {known})")
        return self.running[name]

    def present(self, name: str, settings: Settings) -> JobRuntime | None:
        """The job of this name, or None. Raises Conflict if it has other settings, or if there is none and no further
        job is allowed."""
        if name not in self.aside and name not in self.running:
            if len(self.running) + len(self.aside) >= MOST_JOBS:
                raise Conflict(f"there are {MOST_JOBS} jobs: delete one first")
            return None
        present = self.find(name)
        if present.job.settings != settings:
            raise Conflict(
                f"job {name!r} exists with other settings: choose another name, or delete it first"
            )
        return present

    def open_record(self, runtime: JobRuntime) -> None:
        """Start or continue a job's record."""
        if self._runs is None:
            return
        runtime.record = JobRecord(self._runs / runtime.name, runtime.name, runtime.job.settings)
        runtime.record.open(runtime.first, runtime.job.settled)
        for closed in runtime.behind:
            runtime.record.write(closed, runtime.job.members.names())
        runtime.behind = []

    def forget(self, name: str) -> None:
        """Remove a deleted job, and finish its record."""
        self.aside.pop(name, None)
        runtime = self.running.pop(name, None)
        if runtime is not None:
            runtime.wake()
            if runtime.record is not None:
                self._store.aside(runtime.record.finish)
                self._store.aside(runtime.record.close)

    def set_aside(self, name: str, version: str, why: str) -> None:
        """Set aside a job that cannot continue. version: of Paceline, which wrote it."""
        self.aside[name] = (
            f"job {name!r} is set aside: {why}; it was written by version {version}, and its stored state is kept: "
            "start the service with this version or restore its state, or delete the job"
        )
        _log.error("%s", self.aside[name])
        runtime = self.running.pop(name, None)
        if runtime is not None:
            runtime.wake()


def _in_words(error: Exception) -> str:
    return str(error) if isinstance(error, PacelineError) else f"{type(error).__name__}: {error}"
