"""The jobs there are: those that run, and those that cannot go on and are set aside.

What is stored of a job that is set aside is kept; it is named in the log and in the API, and all others run.
"""

from __future__ import annotations

import logging
from pathlib import Path

from paceline.errors import PacelineError
from paceline.serve.recording import Record
from paceline.serve.refusals import Conflict, NotFound, SetAside
from paceline.serve.served import Served
from paceline.serve.settings import Settings
from paceline.serve.store import Store

MOST_JOBS = 100
_log = logging.getLogger(__name__)


class Catalog:
    """All jobs as they are on disk, by name.

    runs: where each job leaves a run directory; None where none does.
    """

    def __init__(self, store: Store, runs: Path | None) -> None:
        self._store, self._runs = store, runs
        self.running: dict[str, Served] = {}
        self.aside: dict[str, str] = {}  # and why
        self.unresumed: list[Served] = []  # that ran before this service was started
        for kept in store.read():
            try:
                served = Served(kept)
            except PacelineError as error:
                _log.debug("job %r cannot go on", kept.name, exc_info=error)
                self.set_aside(kept.name, kept.rules, str(error))
                continue
            self.running[kept.name] = served
            if served.logged or served.written_by != served.rules:
                self.unresumed.append(served)
            self.open_record(served)
            if served.written_by != served.rules:
                _log.warning(
                    "job %r was written by rules %s, and these are %s: the rounds that were handed out stand, and "
                    "the next plans are made by these",
                    kept.name,
                    kept.rules,
                    served.rules,
                )

    def find(self, name: str) -> Served:
        """The job of this name; raises NotFound, or SetAside."""
        served = self.running.get(name)
        if served is None:
            if name in self.aside:
                raise SetAside(self.aside[name])
            known = ", ".join(list(self.running)[:5]) or "none"
            raise NotFound(f"job {name!r} is unknown here: create it first (there are: {known})")
        return served

    def present(self, name: str, settings: Settings) -> Served | None:
        """The job of this name where there is one. Raises Conflict where it has other settings."""
        if name in self.aside:
            raise SetAside(self.aside[name])
        present = self.running.get(name)
        if present is not None and present.job.settings != settings:
            raise Conflict(
                f"job {name!r} exists with other settings: choose another name, or delete it first"
            )
        return present

    def check_room(self) -> None:
        """Raises Conflict where there are as many jobs as there may be."""
        if len(self.running) + len(self.aside) >= MOST_JOBS:
            raise Conflict(f"there are {MOST_JOBS} jobs: delete one first")

    def open_record(self, served: Served) -> None:
        """Begin a job's record, or go on with it."""
        if self._runs is None:
            return
        served.record = Record(self._runs / served.name, served.name, served.job.settings)
        served.record.open(served.first, served.job.settled)
        for closed in served.behind:
            served.record.write(closed)
        served.behind = []

    def forget(self, name: str) -> None:
        """A job has been deleted."""
        self.aside.pop(name, None)
        served = self.running.pop(name, None)
        if served is not None:
            served.wake()
            if served.record is not None:
                self._store.aside(served.record.finish)
                self._store.aside(served.record.close)

    def set_aside(self, name: str, rules: str, why: str) -> None:
        """A job cannot go on. rules: that wrote it."""
        served = self.running.pop(name, None)
        self.aside[name] = (
            f"job {name!r} is set aside: {why}; it was written by rules {rules}, and what is stored of it is kept: "
            "start the service with these rules or restore its state, or delete the job"
        )
        _log.error("%s", self.aside[name])
        if served is not None:
            served.wake()
