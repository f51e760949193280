"""Supervises the workers of a run: notices those that end, kills frozen ones, starts others in their place, and
decides which are members."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Container
from datetime import timedelta
from typing import NamedTuple

import torch.distributed as dist

from paceline import tokens
from paceline.torch.elastic.gateway import LOOPBACK, Gateway, socket_at
from paceline.torch.elastic.messages import BEAT, COMES, ENDING, HAS, MembershipEpoch, Signer, Where, WorkerId
from paceline.torch.elastic.nodes import GONE, OtherMachines, WorkerProcess, patience
from paceline.torch.liveness.detector import TIMES, FailureDetector, Starved

DEAD_SECONDS = 1.0  # without a heartbeat until a worker is lost
ENDING_SECONDS = 30.0  # that a program may take to end, without a heartbeat
GRACE = 0.1  # seconds to notice the end of a worker after sums have failed
KEPT = 8  # membership epochs whose notices stay in the store


class Loss(NamedTuple):
    """A worker that takes part no more."""

    ident: int
    place: int
    words: str  # "was killed by SIGKILL"
    lost: bool  # otherwise it has left, or ended, in good order
    failed: bool  # by its own error, which would occur again: no other is started in its place


class Supervisor:
    """Call ``look`` again and again. This is the only place that decides which workers are lost.

    start: starts a worker process. restarts: how many may be started in place of lost ones. dead: seconds without a
    heartbeat after which a worker is killed; ``TIMES`` as many for one here that has work (``Starved``). port: of
    the store where the workers meet, 0 for any. host: this machine, as others reach it. elsewhere: this many of the
    places, the last ones, are on other machines. token: that the launchers there must have; empty if all of them are
    on this machine.

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
        self.news: list[str] = []  # sentences about the other machines
        self._gateway: Gateway | None = None
        self.store = _store(0 if elsewhere else port)
        if elsewhere:
            self._gateway = Gateway(host, port, token, self.store.port, self.news.append)
        self._signer = Signer(self._gateway.secret if self._gateway is not None else tokens.fresh())
        self._machines = OtherMachines(self.store, dead, self._signer)
        self._starved, self._detector = Starved(dead), FailureDetector(dead)
        self._start, self._places, self._dead = start, places, dead
        self._here = places - elsewhere
        self.restarts = restarts
        self.workers: dict[int, WorkerProcess] = {}  # that live
        self.placed: dict[int, int] = {}  # the place of each worker that was started
        self._notified: set[int] = set()  # workers that live, and others whose end was not seen
        self.members: list[WorkerId] = []
        self.newest = -1  # number of the newest membership epoch
        self._hard = -1  # number of the newest hard one
        self._bell = -1  # the value of the store's counter of requests at the last look
        self._broken: dict[int, float] = {}  # epochs whose sums have failed, and since when that is known
        self._waiting = False  # a worker may want to join or leave
        # No more workers are started: the members come to their end, or none is left.
        self._ends = False
        for place in range(places):
            self.start(place)

    @property
    def running(self) -> bool:
        """Whether the first members have met."""
        return self.newest >= 0

    def start(self, place: int) -> int:
        """Start a worker for this place; returns its ident."""
        ident = len(self.placed)
        self.placed[ident] = place
        self.store.set(BEAT(ident), "0")
        self._notified.add(ident)
        where = Where(self.store.host, self.store.port, ident, place, self._places, self._signer.secret)
        self.workers[ident] = self._start(where) if place < self._here else self._machines.start(where)
        return ident

    def look(self) -> list[Loss]:
        """Watch the workers and change the members, and return at once: the workers that take part no more since the
        last call. Those that were killed come first, since other losses may follow from theirs."""
        if self._here < self._places:
            self._look_elsewhere()
        ends = {
            ident: status for ident, worker in self.workers.items() if (status := worker.poll()) is not None
        }
        left = {ident for ident in ends if self.store.check([f"leave/{ident}"])}
        ended = any(status == 0 and ident not in left for ident, status in ends.items())
        self._ends |= self.running and ended
        if self._ends:  # before the workers that have the model are gone, which others would take for a loss
            self._dismiss(ends)
        for ident in ends:
            self.workers.pop(ident)
        self._notified -= ends.keys()
        now = time.monotonic()
        silent, ending = self._look_for_silent(now) if self._detector.due(now) else ({}, set[int]())
        frozen = [self.workers.pop(ident) for ident in silent]
        try:
            self._change_members(now, ends.keys() | silent.keys() | ending)
        finally:  # also if Ctrl-C comes meanwhile: ``close`` does not know them any more
            for worker in frozen:
                worker.kill()
        self._ends |= self.running and not self.members  # no worker is left that has the model
        found = []
        for ident, status in (ends | dict.fromkeys(silent)).items():
            order, failed = status == 0, status is not None and status > 0
            words = (
                silent[ident]
                if status is None
                else f"was on a machine that gave no heartbeat for {patience(self._dead, self.running):g} s"
                if status == GONE
                else "left"
                if ident in left and order
                else "ended"
                if order
                else f"was killed by {next((one.name for one in signal.Signals if one == -status), -status)}"
                if status < 0
                else f"ended with status {status}"
            )
            found.append(Loss(ident, self.placed[ident], words, not order, failed))
            # A worker that was lost with its machine is started when a machine joins; an error would occur again.
            again = not (order or failed or status == GONE)
            if again and self.restarts > 0 and self.running and not self._ends:
                self.restarts -= 1
                self.start(self.placed[ident])
        if self._ends:
            self._dismiss()
        return sorted(found, key=lambda loss: loss.failed)

    def leave(self) -> None:
        """Order all workers to take part until the end of the round, and leave."""
        self.restarts = 0
        for worker in self.workers.values():
            worker.terminate()

    def close(self, status: int = 0) -> None:
        """Kill all workers that still live, and admit no others. status: the run's exit status."""
        for worker in self.workers.values():
            worker.kill()
        self.workers = {}
        self._machines.close(status)
        if self._gateway is not None:
            self._gateway.close()

    def _look_elsewhere(self) -> None:
        news = self._machines.look(self.running)
        self.news += news
        taken = {self.placed[ident] for ident in self.workers}
        free = [place for place in range(self._here, self._places) if place not in taken]
        if news and free and not self._ends:
            for place in free[: max(self._machines.free, 0)]:
                self.start(place)

    def _dismiss(self, ends: Container[int] = ()) -> None:
        """Kill the workers without the model, since none will hand it over. ends: idents of ended workers."""
        for ident in [ident for ident in self.workers if not self.store.check([HAS(ident)])]:
            self.members = [member for member in self.members if member.ident != ident]
            if ident not in ends:
                self.workers.pop(ident).kill()

    # -- the members ----------------------------------------------------------------------------------------------

    def _look_for_silent(self, now: float) -> tuple[dict[int, str], set[int]]:
        """The workers without a heartbeat for too long, each with words for that; and those that are ending."""
        dead = patience(self._dead, self.running)
        long = max(dead, TIMES * self._dead)
        idents = list(self.workers)
        raws = self.store.multi_get([BEAT(ident) for ident in idents]) if idents else []
        silent = self._detector.silent(now, dict(zip(idents, map(bytes, raws), strict=True)), dead)
        quiet = self._detector.quiet(dead / 2)
        pids = {ident: pid for ident in quiet if (pid := self.workers[ident].pid) is not None}
        working = self._starved.look(now, pids)
        ending = {ident for ident in silent if self.store.check([ENDING(ident)])}
        found = {}
        for ident, seconds in silent.items():
            busy = ident in working and ident not in ending
            if seconds >= (dead + ENDING_SECONDS if ident in ending else long if busy else dead):
                found[ident] = (
                    f"was busy and gave no heartbeat for {long:g} s"
                    if busy
                    else f"gave no heartbeat for {dead:g} s"
                )
        return found, ending

    def _change_members(self, now: float, gone: set[int]) -> None:
        """Publish a new membership epoch if the members change. gone: workers that can be members no more."""
        bell = self.store.add("bell", 0)
        rung, self._bell = bell != self._bell, bell
        if not self.running:
            if len(self.workers) == self._places and all(
                self._asked("join", ident) for ident in self.workers
            ):
                first = [WorkerId(ident, self.placed[ident]) for ident in self.workers]
                self.members = sorted(first, key=lambda member: member.place)
                self._publish(hard=True)
            return
        if any(member.ident in gone for member in self.members):
            self.members = [member for member in self.members if member.ident not in gone]
            if self.members:
                self._publish(hard=True)
        elif rung or self._broken:
            self._look_for_broken(now)
        self._waiting |= rung
        if self._waiting and self.members:
            self._let_in_and_out()

    def _look_for_broken(self, now: float) -> None:
        for number in range(self._hard, self.newest + 1):
            if number not in self._broken and self.store.check([f"broken/{number}"]):
                self._broken[number] = now
        if any(now - since > GRACE for number, since in self._broken.items() if number >= self._hard):
            self._publish(hard=True)  # no member has died: the same members meet once more

    def _let_in_and_out(self) -> None:
        leaving = {member.ident for member in self.members if self._asked("leave", member.ident)}
        held = {member.place for member in self.members if member.ident not in leaving}
        others = self.workers.keys() - {member.ident for member in self.members}
        new: list[WorkerId] = []
        for ident in sorted(others):
            goes = self._asked("leave", ident) or self._asked("ending", ident)
            if self._asked("join", ident) and not goes and self.placed[ident] not in held:
                held.add(self.placed[ident])  # another worker for the same place waits until it is free
                new.append(WorkerId(ident, self.placed[ident]))
        if self.store.add(f"entered/{self.newest}", 0) < len(self.members):
            return  # ``_waiting`` stays: look again
        self._waiting = len(new) < len(others)
        stay = [member for member in self.members if member.ident not in leaving]
        if not stay:
            new = []  # no member is left that has the model: the run ends after this round
        if leaving or new:
            self.members = sorted([*stay, *new], key=lambda member: member.place)
            self._publish(hard=False)

    def _asked(self, what: str, ident: int) -> bool:
        return bool(self.store.check([f"{what}/{ident}"]))

    def _publish(self, hard: bool) -> None:
        self.newest += 1
        if hard:
            self._hard = self.newest
            self._broken.clear()
        epoch = MembershipEpoch(self.newest, tuple(self.members), hard)
        key = f"membership/{self.newest}"
        self.store.set(key, self._signer.signed(key, epoch))
        for ident in self._notified:  # also workers that were given up and may live
            self.store.set(COMES(self.newest, ident), "")
            self.store.delete_key(COMES(self.newest - KEPT, ident))
        self._waiting = True


def _store(port: int) -> dist.TCPStore:
    """A store that this process hosts, and that listens on this machine only.

    Its socket is an IPv4 socket: for an IPv6 connection the store looks up the peer's name, and blocks meanwhile, for
    5 s if no name server answers. Raises PacelineError if the port cannot be used."""
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
