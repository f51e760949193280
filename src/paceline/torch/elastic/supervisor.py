"""Supervises the workers of a run: sees who ends, makes sure that the frozen are dead, starts others."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from datetime import timedelta
from typing import NamedTuple

import torch.distributed as dist

from paceline import tokens
from paceline.torch.elastic.gateway import LOOPBACK, Door, socket_at
from paceline.torch.elastic.membership import DEAD_SECONDS, HAS, Membership, Where
from paceline.torch.elastic.messages import Seal
from paceline.torch.elastic.nodes import GONE, Machines, WorkerProcess
from paceline.torch.liveness.detector import Starved


class Loss(NamedTuple):
    """A worker that takes part no more."""

    ident: int
    place: int
    words: str  # "was killed by SIGKILL"
    time: float  # when it was seen, as ``time.time`` tells it
    lost: bool  # else it has left, or ended, in good order
    failed: bool  # by an error of its own, which would come again: no other is started in its place


class Supervisor:
    """start: starts a worker process. restarts: how many may be started in place of lost ones. dead: seconds without
    a sign of life after which a worker is killed; ten times as many for one here that has work (``Starved``). port:
    where the workers meet, 0 for any. host: this machine, as others reach it. elsewhere: so many of the places, the
    last ones, are on other machines. token: that the launchers there must have; empty if all of them are on this
    machine.

    Raises PacelineError if the port cannot be used.
    """

    def __init__(
        self,
        places: int,
        start: Callable[[Where], WorkerProcess],
        restarts: int = 0,
        dead: float = DEAD_SECONDS,
        port: int = 0,
        host: str = LOOPBACK,
        elsewhere: int = 0,
        token: str = "",
    ) -> None:
        self.news: list[str] = []  # of the other machines
        self._door: Door | None = None
        self.store = _store(0 if elsewhere else port)
        if elsewhere:
            self._door = Door(host, port, token, self.store.port, self.news.append)
        self._seal = Seal(self._door.secret if self._door is not None else tokens.fresh())
        self._starved = Starved(dead)
        self.membership = Membership(self.store, places, dead, self._seal, self._working)
        self.workers: dict[int, WorkerProcess] = {}  # that live
        self.restarts = restarts
        self._start, self._places, self._dead = start, places, dead
        self._here = places - elsewhere
        self._machines = Machines(self.store, dead, self._seal)
        # No more workers are started: those who take part come to their end, or none is left.
        self._ends = False
        self._next = 0
        for place in range(places):
            self.start(place)

    @property
    def running(self) -> bool:
        """Whether the first members have met."""
        return self.membership.running

    def start(self, place: int) -> int:
        """Start a worker for this place; its number."""
        ident, self._next = self._next, self._next + 1
        self.membership.started(ident, place)
        where = Where(self.store.host, self.store.port, ident, place, self._places, self._seal.secret)
        self.workers[ident] = self._start(where) if place < self._here else self._machines.start(where)
        return ident

    def look(self) -> list[Loss]:
        """See to everything, and return at once: who takes part no more since the last call."""
        if self._here < self._places:
            self._look_elsewhere()
        places = {member.ident: member.place for member in self.membership.workers.values()}
        ends = {
            ident: status for ident, worker in self.workers.items() if (status := worker.status()) is not None
        }
        left = {ident for ident in ends if self.store.check([f"leave/{ident}"])}
        self._ends |= any(status == 0 and ident not in left for ident, status in ends.items())
        if self._ends:  # before those who have the model are gone: the others would take that for a loss
            self._dismiss()
        dead, long = self.membership.dead, self.membership.long
        frozen = self.membership.look(ends)
        self._ends |= self.running and not self.membership.members  # nobody is left who has the model
        for ident in frozen:
            self.workers[ident].kill()
        found = []
        for ident in [*ends, *frozen]:
            self.workers.pop(ident, None)
            if ident not in places:
                continue  # told before
            status = ends.get(ident)
            order, failed = status == 0, status is not None and status > 0
            words = (
                f"was busy and gave no sign of life for {long:g} s"
                if ident in self.membership.endless
                else f"gave no sign of life for {dead:g} s"
                if status is None
                else f"was on a machine that gave no sign of life for {self._dead:g} s"
                if status == GONE
                else "left"
                if ident in left and order
                else "ended"
                if order
                else f"was killed by {signal.Signals(-status).name}"
                if status < 0
                else f"ended with status {status}"
            )
            found.append(Loss(ident, places[ident], words, time.time(), not order, failed))
            # Who was lost with a machine comes again with one; and an error of its own would come again, too.
            again = not (order or failed or status == GONE)
            if again and self.restarts > 0 and self.running and not self._ends:
                self.restarts -= 1
                self.start(places[ident])
        if self._ends:
            self._dismiss()
        return found

    def leave(self) -> None:
        """Tell all to take part until the end of the round, and go."""
        self.restarts = 0
        for worker in self.workers.values():
            worker.leave()

    def close(self, status: int = 0) -> None:
        """Kill all who still live, and let nobody in any more. status: with what the run ends."""
        for worker in self.workers.values():
            worker.kill()
        self.workers = {}
        self._machines.close(status)
        if self._door is not None:
            self._door.close()

    def _look_elsewhere(self) -> None:
        news = self._machines.look()
        self.news += news
        taken = {member.place for member in self.membership.workers.values()}
        free = [place for place in range(self._here, self._places) if place not in taken]
        if news and free and not self._ends:
            for place in free[: max(self._machines.free, 0)]:
                self.start(place)

    def _working(self, idents: list[int]) -> set[int]:
        """Those of these workers that have work, as far as this machine can tell."""
        here = {ident: self.workers[ident].pid for ident in idents if ident in self.workers}
        pids = {ident: pid for ident, pid in here.items() if pid is not None}
        return self._starved.look(time.monotonic(), pids)

    def _dismiss(self) -> None:
        """Nobody hands anything over any more to those who do not have the model yet."""
        for ident in [ident for ident in self.workers if not self.store.check([HAS(ident)])]:
            if self.membership.dismiss(ident):
                self.workers.pop(ident).kill()


def _store(port: int) -> dist.TCPStore:
    """A store that this process holds, and that listens on this machine alone.

    Its socket is one of IPv4: the store asks the name of each that connects by IPv6, and stands still meanwhile, for
    5 s where no name server answers. Raises PacelineError if the port cannot be used."""
    listening = socket_at(LOOPBACK, port)
    return dist.TCPStore(
        LOOPBACK,
        listening.getsockname()[1],
        None,
        True,
        timedelta(seconds=60),
        wait_for_workers=False,
        master_listen_fd=listening.detach(),
    )
