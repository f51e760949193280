"""Who takes part, as a launcher decides it: it outlives all workers, and keeps the store that they meet in."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any

from paceline.torch.elastic.generation import Generation, Member
from paceline.torch.elastic.link import ending
from paceline.torch.elastic.messages import OPEN, Seal
from paceline.torch.elastic.news import KEPT, life, told
from paceline.torch.liveness.detector import TIMES, FailureDetector

DEAD_SECONDS = 1.0  # without a sign of life
BEGIN_SECONDS = 30.0  # the same, at least, until all have begun: nobody waits for a sum by then
ENDING_SECONDS = 30.0  # that a program may take to end, without a sign of life
GRACE = 0.1  # seconds for the end of a worker to be seen, after sums have failed


class Membership:
    """The members of one run. ``started`` for each worker process, then ``look`` again and again.

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
        self._store, self._places, self._dead, self._signs = store, places, dead, FailureDetector(dead)
        self._seal, self._working = seal, working
        self._at_work: set[int] = set()  # of those that are silent
        self.endless: set[int] = set()  # of those that the last look gave up: they had work, and for too long
        self.workers: dict[int, Member] = {}  # that were started and may live
        self._hearing: set[int] = set()  # those, and others of which no end was seen
        self.members: list[Member] = []
        self.newest = -1  # generation
        self._hard = -1
        self._bell = -1
        self._broken: dict[
            int, float
        ] = {}  # generations whose sums have failed, and since when that is known
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
        self._store.set(life(ident), "0")
        self.workers[ident] = Member(ident, place)
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
        lost = [ident for ident in ended if self.workers.pop(ident, None) is not None]
        silent = self._silent(now) if self._signs.due(now) else {}
        ending_ones = {ident for ident in silent if self._store.check([ending(ident)])}
        frozen = [ident for ident in silent if silent[ident] >= self._most(ident, ident in ending_ones)]
        self.endless = {ident for ident in frozen if ident in self._at_work and ident not in ending_ones}
        for ident in frozen:
            self.workers.pop(ident)
        gone = {*lost, *frozen, *ending_ones}
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

    def _look_for_broken(self, now: float) -> None:
        for number in range(self._hard, self.newest + 1):
            if number not in self._broken and self._store.check([f"broken/{number}"]):
                self._broken[number] = now
        if any(now - since > GRACE for number, since in self._broken.items() if number >= self._hard):
            self._publish(hard=True)  # nobody has died: the same members meet once more

    def _let_in_and_out(self) -> None:
        leaving = {member.ident for member in self.members if self._asked("leave", member.ident)}
        held = {member.place for member in self.members if member.ident not in leaving}
        new: list[Member] = []
        for worker in self.workers.values():
            asks = self._asked("join", worker.ident) and not self._asked("leave", worker.ident)
            if worker not in self.members and worker.place not in held and asks:
                held.add(worker.place)  # another for the same place waits until it is free
                new.append(worker)
        settled = self._store.add(f"entered/{self.newest}", 0) >= len(self.members)
        if not settled:
            return  # and look again
        self._waiting = any(
            worker not in self.members and worker not in new for worker in self.workers.values()
        )
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
        generation = Generation(self.newest, tuple(self.members), hard)
        key = f"generation/{self.newest}"
        self._store.set(key, self._seal.closed(key, generation))
        for ident in self._hearing:  # also those that were given up and may live
            self._store.set(told(self.newest, ident), "")
            self._store.delete_key(told(self.newest - KEPT, ident))
        self._waiting = True

    def _silent(self, now: float) -> dict[int, float]:
        """Workers without a sign of life for too long, and for how long."""
        idents = list(self.workers)
        lives = self._store.multi_get([life(ident) for ident in idents]) if idents else []
        silent = self._signs.silent(now, dict(zip(idents, map(bytes, lives), strict=True)), self.dead)
        self._at_work = self._working(self._signs.quiet(self.dead / 2))
        return silent

    def _most(self, ident: int, ends: bool) -> float:
        """Seconds of silence from which on a worker is frozen. ends: whether it has told that its program does."""
        if ends:
            return self.dead + ENDING_SECONDS
        return self.long if ident in self._at_work else self.dead
