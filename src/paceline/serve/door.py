"""The one door to all jobs: whatever changes one is logged first, and carried out when it is in the log.

That is in the log's order. Should the log fail, nothing has happened, and all who wait are told.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import time
from collections.abc import Callable
from typing import Any

from paceline.serve import events
from paceline.serve import store as stored
from paceline.serve.catalog import Catalog
from paceline.serve.effects import Closed, Effect, Joined, Left, Ready, Settled, Unlearned
from paceline.serve.events import Event
from paceline.serve.refusals import NotFound, NotStored, SetAside
from paceline.serve.served import Served
from paceline.serve.store import Store
from paceline.serve.turns import Turn

PAUSE = 1.0  # seconds for which a store that failed is left alone
CALLS = 1000  # calls after which a job's whole state is stored, and
CALLS_PER_WORKER = 8
Observer = Callable[[str, Effect], None]
_log = logging.getLogger(__name__)


class Door:
    """Tells ``observers`` what came of each event, by the job's name. clock: seconds that never go back."""

    def __init__(self, store: Store, catalog: Catalog, clock: Callable[[], float] = time.monotonic) -> None:
        self._store, self._catalog, self._clock = store, catalog, clock
        self.observers: list[Observer] = []
        self.trouble = ""  # why nothing can be stored just now
        self._refuse_until = 0.0

    @property
    def shut(self) -> bool:
        """Whether the store has just failed, and is left alone."""
        return self._clock() < self._refuse_until

    def check_open(self) -> None:
        """Raises NotStored while the door is shut."""
        if self.shut:
            raise NotStored(self.trouble)

    def failed(self, sentence: str) -> None:
        """The log could not be written: what was on its way has not happened."""
        if not self.trouble:
            _log.error("%s", sentence)
        self._refuse_until, self.trouble = self._clock() + PAUSE, sentence
        for served in self._catalog.running.values():
            served.logged, served.stored = served.done, 0  # a state that was on its way is written once more

    def change(self, *statements: stored.Statement, act: Callable[[], Any]) -> asyncio.Future[Any]:
        """Write what makes or ends a job; ``act`` when it is on disk."""
        self.check_open()
        return asyncio.shield(self._store.write(*statements, act=act))

    def enter(self, served: Served, turn: Turn, event: Event) -> asyncio.Future[list[Effect]]:
        """Log an event that the job will take, and then have the job handle it. Its turn must be free."""
        self.check_open()
        served.logged += 1
        served.turns.take(turn)
        outcome = self._store.write(
            stored.called(served.name, served.logged, events.logged(event)),
            act=functools.partial(self._act, served, served.logged, event),
        )
        outcome.add_done_callback(lambda _: served.turns.give_back(turn))
        return asyncio.shield(outcome)  # whoever waits may go; the call is made all the same

    def write_state(self, served: Served) -> None:
        """Store a job's whole state; the calls before are no longer needed."""
        served.stored = served.done
        settings = served.job.settings.to_dict()
        reached = stored.reached(served.name, settings, served.rules, served.done, served.state())
        self._store.write(*reached, act=lambda: None)

    def complain(self, served: Served, what: str, error: Exception) -> None:
        """Say it once in the log, not at every look."""
        if isinstance(error, NotStored):
            raise error
        complaint = f"{what} ({type(error).__name__}: {error})"
        if complaint != served.complaint:
            served.complaint = complaint
            _log.error("%s", complaint, exc_info=error)

    def _act(self, served: Served, number: int, event: Event) -> list[Effect]:
        """An event is in the log: have the job handle it."""
        self.trouble = ""
        if self._catalog.running.get(served.name) is not served:
            self._catalog.find(served.name)  # says why
            raise NotFound(f"job {served.name!r} has been deleted")
        try:
            self._store_state(served)
            effects = served.job.handle(event)
        except Exception as error:
            _log.error("job %r failed at call %d", served.name, number, exc_info=error)
            self._catalog.set_aside(served.name, served.rules, f"call {number} of its log failed ({error})")
            raise SetAside(self._catalog.aside[served.name]) from error
        served.done, served.newest = number, event.now
        if any(isinstance(each, Left | Settled | Ready) for each in effects):
            served.wake()
        for effect in effects:
            self._observe(served, effect)
        if served.record is not None and not served.job.members.count:
            self._store.aside(served.record.finish)
        return effects

    def _observe(self, served: Served, effect: Effect) -> None:
        if isinstance(effect, Joined | Left):
            _log.info("job %r: %s", served.name, effect)
        for observe in self.observers:
            observe(served.name, effect)
        if isinstance(effect, Closed):
            served.lately.append(effect)
        if served.record is not None and isinstance(effect, Closed):
            self._store.aside(functools.partial(served.record.write, effect))
        if isinstance(effect, Unlearned):
            what = f"the policy of job {served.name!r} failed at a round: its plans are those of before"
            self.complain(served, what, effect.error)

    def _store_state(self, served: Served) -> None:
        """Store the whole state now and then, so that the log does not grow: just before a round closes, since a
        decision that is made aside is ready by then, and nothing waits for it.
        """
        most = max(CALLS, CALLS_PER_WORKER * served.job.settings.workers)
        if served.job.closing and served.done - served.stored >= most:
            self.write_state(served)
