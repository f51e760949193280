"""The rounds of a served job as a run directory: what ``paceline report`` and the live page read."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np

from paceline import runs
from paceline.errors import PacelineError
from paceline.files import sweep
from paceline.runs.run import CONFIG
from paceline.serve.events import Closed
from paceline.serve.models import Settings


class Record:
    """Appends to one run directory, in one thread at a time. Trouble ends the record, not the job: see ``error``."""

    def __init__(self, run_dir: Path, name: str, settings: Settings) -> None:
        self.run_dir, self.error = run_dir, ""
        self._config = {"engine": "service", "job": name, "workers": settings.workers} | {
            "global_batch": settings.batch,
            "policy": settings.asked_policy,
            "settings": settings.model_dump(),
        }
        self._recorder: runs.Recorder | None = None
        self._origin: float | None = None  # the job's time at which this part of the record starts
        self._next = 0  # rounds before this one are written

    def open(self, first: int, settled: int) -> None:
        """Start, or go on with what is there; what is another job's, or lacks rounds, is moved aside.

        first: the round that will be written first. settled: rounds of the job.
        """
        try:
            resume = None
            if (self.run_dir / CONFIG).exists():
                sweep(self.run_dir)
                before = runs.read(self.run_dir)
                written = int(before.round[-1]) + 1 if len(before.round) else 0
                mine = before.config.get("settings") == self._config["settings"]
                if written > settled or written < first or not mine:
                    self._move_aside()
                else:
                    resume = self._next = written
            self._recorder = runs.Recorder.create(self.run_dir, self._config, resume)
        except PacelineError as error:
            self.error = str(error)

    def write(self, closed: Closed) -> None:
        """One round; one that is there already (from before a restart) is left as it is."""
        if self._recorder is None or closed.round < self._next:
            return
        if self._origin is None:
            self._origin = closed.now - closed.seconds
        known = not np.isnan(closed.shares).any()
        try:
            self._recorder.round(
                round=closed.round,
                epoch=0,
                time=round(closed.now - self._origin, 6),
                seconds=round(closed.seconds, 6),
                batch=int(np.nansum(closed.loads)),
                loads=[None if load != load else int(load) for load in closed.loads.tolist()],
                compute=np.round(closed.compute, 9),
                overhead=np.where(np.isnan(closed.compute), np.nan, np.round(closed.overhead, 9)),
                shares=np.round(closed.shares, 9) if known else None,
            )
            self._next = closed.round + 1
        except PacelineError as error:
            self._stop(str(error))

    def finish(self) -> None:
        """Everybody is gone: leave a summary."""
        if self._recorder is not None and self._next:
            try:
                self._recorder.finish()
            except PacelineError as error:
                self._stop(str(error))

    def close(self) -> None:
        """End the record."""
        self._stop("")

    def _move_aside(self) -> None:
        """Give the directory another name, which no job can have."""
        names = (self.run_dir.with_name(f"{self.run_dir.name}~{number}") for number in itertools.count(1))
        try:
            self.run_dir.rename(next(name for name in names if not name.exists()))
        except OSError as error:
            raise PacelineError(f"cannot rename {self.run_dir}: {error.strerror}; do it by hand") from error

    def _stop(self, error: str) -> None:
        recorder, self._recorder = self._recorder, None
        if recorder is not None:
            self.error = error
            try:
                recorder.close()
            except OSError as full:
                self.error = self.error or str(full)
