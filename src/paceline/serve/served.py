"""A job and what a service needs around it."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Any

from paceline.errors import PacelineError
from paceline.serve import events
from paceline.serve.effects import Closed
from paceline.serve.jobs import Job
from paceline.serve.recording import Record
from paceline.serve.rules import version
from paceline.serve.settings import Settings
from paceline.serve.store import Kept
from paceline.serve.turns import Turns

LATELY = 40  # rounds that the page of all jobs tells of


class Served:
    """The job as it is stored. Raises PacelineError, why it cannot go on, where that cannot be carried out."""

    def __init__(self, kept: Kept) -> None:
        if kept.wrong:
            raise PacelineError(kept.wrong)
        self.name = kept.name
        self.record: Record | None = None
        settings = Settings.from_dict(kept.settings)
        self.job = Job(settings)
        self.rules = version(self.job.balancer.policy)
        self.written_by = kept.rules or self.rules
        self.newest = 0.0  # the time of the newest call
        self.turns = Turns()
        self.logged = self.done = self.stored = (
            kept.through
        )  # the newest call in the log, carried out, in a state
        self.waiters: set[asyncio.Future[None]] = set()
        self.complaint = ""  # what was last said of it in the service's log
        self.behind: list[Closed] = []  # rounds that closed in the calls
        self.lately: deque[Closed] = deque(maxlen=LATELY)
        if kept.state is not None:
            try:
                self.newest = float(kept.state["now"])
                self.job.load_state_dict(kept.state["job"])
            except Exception as error:
                raise PacelineError(f"its state cannot be used ({_said(error)})") from error
        self.first = self.job.oldest  # round that closes next
        for number, call in enumerate(kept.calls, kept.through + 1):
            try:
                event = events.read(call)
                effects = self.job.handle(event)
                self.newest = float(event.now)
            except Exception as error:
                raise PacelineError(
                    f"call {number} of its log cannot be carried out ({_said(error)})"
                ) from error
            self.logged = self.done = number
            self.behind += [each for each in effects if isinstance(each, Closed)]
        self.lately.extend(self.behind)

    def state(self) -> dict[str, Any]:
        """What ``Kept.state`` is to be."""
        return {"now": self.newest, "job": self.job.state_dict()}

    def wake(self) -> None:
        """Let those who wait for a plan look again."""
        waiters, self.waiters = self.waiters, set()
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)


def _said(error: Exception) -> str:
    return str(error) if isinstance(error, PacelineError) else f"{type(error).__name__}: {error}"
