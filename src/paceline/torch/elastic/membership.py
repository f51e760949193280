"""Who takes part, from one change of members to the next, and how a launcher decides it: it outlives all workers, and
keeps the store that they meet in."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from paceline.errors import PacelineError
from paceline.torch.elastic.messages import OPEN, Seal
from paceline.torch.liveness.detector import TIMES, FailureDetector

DEAD_SECONDS = 1.0  # without a sign of life
BEGIN_SECONDS = 30.0  # the same, at least, until all have begun: nobody waits for a sum by then
ENDING_SECONDS = 30.0  # that a program may take to end, without a sign of life
GRACE = 0.1  # seconds for the end of a worker to be seen, after sums have failed
KEPT = 8  # membership epochs
WHERE = "PACELINE_WHERE"  # the variable of the environment that has it


class Worker(NamedTuple):
    """A process that may take part. ident: no other process of the run has it; place: where its numbers stand in all
    arrays, which the process that comes in its stead takes over."""

    ident: int
    place: int


class MembershipEpoch(NamedTuple):
    """The members between two changes, by place. hard: somebody was lost, so that nobody waits for the sums of the
    epoch before; else the change waits for the end of a round."""

    number: int
    members: tuple[Worker, ...]
    hard: bool

    @property
    def places(self) -> tuple[int, ...]:
        """The members' places, in order."""
        return tuple(member.place for member in self.members)

    def holds(self, ident: int) -> bool:
        """Whether this process takes part."""
        return any(member.ident == ident for member in self.members)

    @classmethod
    def of(cls, words: Any) -> MembershipEpoch:
        """The one that JSON has made these words of."""
        number, members, hard = words
        return cls(number, tuple(Worker(*member) for member in members), hard)


class Where(NamedTuple):
    """What a launcher tells a worker: the address of the store, who it is, how many places there are, and the run's
    secret (``Seal``)."""

    host: str
    port: int
    ident: int
    place: int
    places: int
    secret: str = ""

    def environment(self) -> dict[str, str]:
        """The variable that ``told`` reads."""
        return {WHERE: json.dumps(self)}


def told() -> Where:
    """What the launcher has told this process. Raises PacelineError if there is none of ours."""
    try:
        return Where(*json.loads(os.environ[WHERE]))
    except (KeyError, ValueError, TypeError):
        raise PacelineError(
            "elastic=True needs a launcher that outlives the ranks; start the script with "
            "python -m paceline.torch.launcher, or use paceline train"
        ) from None


# Keys of the store, of the worker with that ident: its signs of life; that its program ends, and gives no more of
# them; that it has the model.
BEAT, ENDING, HAS = "life/{}".format, "ending/{}".format, "has/{}".format
# And that there is a membership epoch of that number; the worker may set it itself, to wake up.
COMES = "told/{}/{}".format


class Membership:
    """The members of one run. ``started`` for each worker process, then ``look`` again and again: this is the one
    place that says who is lost.

    store: a TCPStore that this process holds. places: of workers. dead: seconds without a sign of life after which a
    worker counts as lost. seal: of the run. working: of the workers that have been silent for half of ``dead`` or
    more, those that are known to have work (``Starved``): these count as lost only after ``TIMES * dead``.
    """

    def __init__(
        self,
        store: Any,
        places: int,
        dead: float = DEAD_SECONDS,
        seal: Seal = OPEN,
        working: Callable[[list[int]], set[int]] = lambda _: set(),
    ) -> None:
        self._store, self._places, self._dead, self._seal = store, places, dead, seal
        self._detector, self._working = FailureDetector(dead), working
        self.endless: set[int] = set()  # of those that the last look gave up: they had work, and for too long
        self.workers: dict[int, Worker] = {}  # that were started and may live
        self._hearing: set[int] = set()  # those, and others of which no end was seen
        self.members: list[Worker] = []
        self.newest = -1  # membership epoch
        self._hard = -1
        self._bell = -1
        self._broken: dict[int, float] = {}  # epochs whose sums have failed, and since when that is known
        self._waiting = False  # somebody may want to join or leave

    @property
    def running(self) -> bool:
        """Whether the first members have met."""
        return self.newest >= 0

    @property
    def dead(self) -> float:
        """Seconds without a sign of life after which a worker counts as lost by now."""
        return self._dead if self.running else max(self._dead, BEGIN_SECONDS)

    @property
    def long(self) -> float:
        """The same for a worker that has work, in seconds."""
        return max(self.dead, TIMES * self._dead)

    def started(self, ident: int, place: int) -> None:
        """A process was started for this place."""
        self._store.set(BEAT(ident), "0")
        self.workers[ident] = Worker(ident, place)
        self._hearing.add(ident)

    def dismiss(self, ident: int) -> bool:
        """It is needed no more, and nobody else is to hear of it. Whether it was there."""
        self.members = [member for member in self.members if member.ident != ident]
        return self.workers.pop(ident, None) is not None

    def look(self, ended: Iterable[int]) -> list[int]:
        """See what has changed. ended: workers whose processes have. Returns those that give no sign of life: make
        sure that they are dead."""
        now = time.monotonic()
        ended = set(ended)
        self._hearing -= ended
        gone = {ident for ident in ended if self.workers.pop(ident, None) is not None}
        frozen = self._look_for_frozen(now, gone) if self._detector.due(now) else []
        bell = self._store.add("bell", 0)
        rung, self._bell = bell != self._bell, bell
        if not self.running:
            if len(self.workers) == self._places and all(self._asked("join", i) for i in self.workers):
                self.members = sorted(self.workers.values(), key=lambda member: member.place)
                self._publish(hard=True)
            return frozen
        if any(member.ident in gone for member in self.members):
            self.members = [member for member in self.members if member.ident not in gone]
            if self.members:
                self._publish(hard=True)
        elif rung or self._broken:
            self._look_for_broken(now)
        self._waiting |= rung
        if self._waiting and self.members:
            self._let_in_and_out()
        return frozen

    def _look_for_frozen(self, now: float, gone: set[int]) -> list[int]:
        """Workers without a sign of life for too long. Adds them, and those that end their programs, to ``gone``."""
        idents = list(self.workers)
        raws = self._store.multi_get([BEAT(ident) for ident in idents]) if idents else []
        silent = self._detector.silent(now, dict(zip(idents, map(bytes, raws), strict=True)), self.dead)
        at_work = self._working(self._detector.quiet(self.dead / 2))
        frozen, self.endless = [], set()
        for ident, seconds in silent.items():
            ends = self._store.check([ENDING(ident)])
            most = self.dead + ENDING_SECONDS if ends else self.long if ident in at_work else self.dead
            if seconds >= most:
                frozen.append(ident)
                self.workers.pop(ident)
                if ident in at_work and not ends:
                    self.endless.add(ident)
            if ends or seconds >= most:
                gone.add(ident)
        return frozen

    def _look_for_broken(self, now: float) -> None:
        for number in range(self._hard, self.newest + 1):
            if number not in self._broken and self._store.check([f"broken/{number}"]):
                self._broken[number] = now
        if any(now - since > GRACE for number, since in self._broken.items() if number >= self._hard):
            self._publish(hard=True)  # nobody has died: the same members meet once more

    def _let_in_and_out(self) -> None:
        leaving = {member.ident for member in self.members if self._asked("leave", member.ident)}
        held = {member.place for member in self.members if member.ident not in leaving}
        new: list[Worker] = []
        for worker in self.workers.values():
            asks = self._asked("join", worker.ident) and not self._asked("leave", worker.ident)
            if worker not in self.members and worker.place not in held and asks:
                held.add(worker.place)  # another for the same place waits until it is free
                new.append(worker)
        if self._store.add(f"entered/{self.newest}", 0) < len(self.members):
            return  # and look again
        known = [*self.members, *new]
        self._waiting = any(worker not in known for worker in self.workers.values())
        stay = [member for member in self.members if member.ident not in leaving]
        if not stay:
            new = []  # nobody is left who has the model: the run ends after this round
        if leaving or new:
            self.members = sorted([*stay, *new], key=lambda member: member.place)
            self._publish(hard=False)

    def _asked(self, what: str, ident: int) -> bool:
        return bool(self._store.check([f"{what}/{ident}"]))

    def _publish(self, hard: bool) -> None:
        self.newest += 1
        if hard:
            self._hard = self.newest
            self._broken.clear()
        epoch = MembershipEpoch(self.newest, tuple(self.members), hard)
        key = f"membership/{self.newest}"
        self._store.set(key, self._seal.closed(key, epoch))
        for ident in self._hearing:  # also those that were given up and may live
            self._store.set(COMES(self.newest, ident), "")
            self._store.delete_key(COMES(self.newest - KEPT, ident))
        self._waiting = True
