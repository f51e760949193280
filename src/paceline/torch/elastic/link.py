"""A worker's connection to its launcher: heartbeats, keys that all members can read, and their rendezvous."""

from __future__ import annotations

import atexit
import base64
import threading
import time
import warnings
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from paceline.errors import PacelineError, WorkerError
from paceline.torch import peers
from paceline.torch.elastic.group import ConnectionPool
from paceline.torch.elastic.messages import (
    BEAT,
    COMES,
    ENDING,
    HAS,
    MembershipEpoch,
    Signer,
    Where,
    WorkerId,
    pack,
    settings,
    unpack,
)
from paceline.torch.liveness import stall
from paceline.torch.liveness.detector import BEAT_SECONDS

CONNECT_SECONDS = 60.0
START_SECONDS = 300.0  # that a worker waits for the others in ``gather`` when the run begins
LOOK = 0.001  # seconds between two looks in a rendezvous
STAY_SECONDS = 5.0  # that a leaving worker waits until the others have let go of it, at most
LATE_SECONDS = stall.SECONDS  # that a rendezvous waits until the members that have not come are named
LONG = timedelta(days=30)
CLOSE_SECONDS = 2.0  # that a thread may take to end, for example if the launcher is stopped


class Left(SystemExit):
    """Ends the program of a rank that has left on purpose, in good order."""


class LauncherLink:
    """The connection of one worker, which gives heartbeats and watches for membership epochs, each in a thread. No
    method waits for a lost rank.

    Raises WorkerError, from any method, if the launcher has gone or has given this worker up.
    """

    def __init__(self, where: Where) -> None:
        self.ident, self.place, self.places = where.ident, where.place, where.places
        self.rank, self.ranks = where.place, where.places  # the names that ``peers`` expects
        self._where, self.signer = where, Signer(where.secret)
        peers.let_forks_alone()
        self._store = self.connect()
        self.connections = ConnectionPool(self.connect)
        self._gathered = 0
        self._epoch: MembershipEpoch | None = None  # the one this worker is in, whose members have the model
        self._leaving = self._joined = False
        self.known: MembershipEpoch | None = None  # the newest
        self._hard = -1  # number of the newest hard epoch
        self._lost = False  # this worker cannot continue, for the reason in ``_wrong``
        self._wrong = "the launcher, which keeps the ranks together, has gone"
        self._over = threading.Event()
        atexit.register(self.close)  # ending may take longer than others wait for a heartbeat
        threads = (("heartbeats", self._beat), ("membership", self._watch))
        self._threads = [threading.Thread(target=target, name=name, daemon=True) for name, target in threads]
        for thread in self._threads:
            thread.start()

    def connect(self) -> dist.TCPStore:
        """A new connection to the store, for calls that may block."""
        host, port, *_ = self._where
        try:
            return dist.TCPStore(host, port, None, False, timedelta(seconds=CONNECT_SECONDS))
        except RuntimeError as error:
            raise WorkerError(f"no launcher answers at {host}:{port}; it may have ended") from error

    def close(self) -> None:
        """Give no more heartbeats, and end the threads: one that is in a call of torch while Python ends would
        abort the process. The second time does nothing."""
        if self._over.is_set():
            return
        with suppress(RuntimeError):
            self._store.set(ENDING(self.ident), "1")
        self._over.set()
        atexit.unregister(self.close)
        with suppress(RuntimeError):
            self._store.set(COMES(self.newest + 1, self.ident), "")  # wakes the thread that waits for it
        for thread in self._threads:
            thread.join(CLOSE_SECONDS)

    # -- before the first round, among the workers that the run begins with ---------------------------------------

    def gather(self, item: Any) -> list[Any]:
        """The items of the workers of all places at this point of their programs, which stay in the store for workers
        that join later. Within the run it does not wait, and gives this worker's own item for each place."""
        if self._epoch is not None:
            return [item] * self.places
        number, self._gathered = self._gathered, self._gathered + 1
        keys = [f"said/{number}/{place}" for place in range(self.places)]
        try:
            said = base64.b64encode(pack(item)).decode()
            self._store.set(keys[self.place], self.signer.signed(keys[self.place], said))
            self._store.wait(keys, timedelta(seconds=START_SECONDS))
            raws = self._store.multi_get(keys)
        except RuntimeError as error:
            raise WorkerError(
                f"worker {self.place} waited {START_SECONDS:.0f} s for all others to begin, or lost the launcher"
            ) from error
        texts = map(self._opened, keys, raws, range(self.places))
        return [unpack(base64.b64decode(text), f"an item of worker {n}") for n, text in enumerate(texts)]

    # -- keys that all members can read ---------------------------------------------------------------------------

    def post(self, key: str, words: Any = 1) -> None:
        """Write a key that all can read. words: of types that JSON has."""
        self._call("set", key, self.signer.signed(key, words))

    def posted(self, key: str) -> bool:
        """Whether the key was written."""
        return bool(self._call("check", [key]))

    def add(self, key: str, amount: int = 0) -> int:
        """Add to a number that all share; returns the result."""
        return int(self._call("add", key, amount))

    def forget(self, key: str) -> None:
        """Delete a key that no member reads any more."""
        self._call("delete_key", key)

    # -- membership epochs ----------------------------------------------------------------------------------------

    def join(self) -> None:
        """This worker can take part from now on. Raises PacelineError the second time."""
        if self._joined:
            raise PacelineError(
                "a second ElasticPace or ElasticLocalSGD was made in one process; expected one"
            )
        self._joined = True
        self._ring(f"join/{self.ident}")

    def leave(self) -> None:
        """Take part until the end of the round; may be called from a signal handler, and returns at once."""
        if not self._leaving:
            self._leaving = True
            threading.Thread(target=self._ring, args=(f"leave/{self.ident}",), daemon=True).start()

    def broken(self, number: int) -> None:
        """The sums of this epoch have failed."""
        self._ring(f"broken/{number}")

    def entered(self, epoch: MembershipEpoch) -> None:
        """This worker runs rounds in this epoch."""
        if self._epoch is None:
            self.post("begun")
            self.post(HAS(self.ident))
        self._epoch = epoch
        self.add(f"entered/{epoch.number}", 1)

    @property
    def newest(self) -> int:
        """Number of the newest epoch; -1 before there is one."""
        return -1 if self.known is None else self.known.number

    def lost_since(self, number: int) -> bool:
        """Whether a member was lost after this epoch was made."""
        return self._hard > number or self._lost

    def newer(self, number: int) -> bool:
        """Whether there is an epoch after this one."""
        return self.newest > number or self._lost

    @property
    def first(self) -> bool:
        """Whether this worker is the first of the newest members that have the model; if all have left after the last
        round, of the members of its own epoch."""
        found, mine = self.known, self._epoch
        if found is None or mine is None:
            return False
        newest = [member for member in found.members or mine.members if member in mine.members]
        return bool(newest) and newest[0].ident == self.ident

    def next(self, number: int) -> MembershipEpoch:
        """Wait for an epoch after this one that has this worker as a member; returns the newest.

        Raises Left if this worker has left, once the others have let go of it."""
        while True:
            self._check()
            found = self.known
            if found is not None and found.number > number:
                if any(member.ident == self.ident for member in found.members):
                    return found
                if number >= 0:
                    self._go()
            if self._leaving and number < 0:
                raise Left(0)  # before it took part
            time.sleep(LOOK)

    def meet(
        self, epoch: MembershipEpoch, word: dict[str, Any], running: str
    ) -> dict[int, dict[str, Any]] | None:
        """The words of all members of an epoch, by ident, once all have arrived; None if a newer epoch comes first.
        All members get the same answer. word: this worker's own, of types that JSON has. running: the round that they
        meet in, for a warning about members that do not come."""
        number, members = epoch.number, epoch.members
        began, beats, late = time.monotonic(), self._beats(members), False
        self.post(f"word/{number}/{self.ident}", word)
        self.add(f"arrived/{number}", 1)
        verdict = b""
        while not verdict:
            if self.add(f"arrived/{number}") >= len(members):
                verdict = self._call("compare_set", f"verdict/{number}", "", "go")
            elif self.newer(number):
                verdict = self._call("compare_set", f"verdict/{number}", "", "skip")
            elif not late and time.monotonic() - began >= LATE_SECONDS:
                late = True
                self._warn_of_late(epoch, beats, running)
            else:
                time.sleep(LOOK)
            self._check()
        if verdict != b"go":
            return None
        keys = [f"word/{number}/{member.ident}" for member in members]
        every = zip(members, keys, self._call("multi_get", keys), strict=True)
        return {member.ident: self._opened(key, raw, member.place) for member, key, raw in every}

    # -- internal -------------------------------------------------------------------------------------------------

    def _go(self) -> None:
        """This worker is no member now: keep its connections while others may read from them, then raise Left."""
        if not self._leaving:
            raise WorkerError(
                f"worker {self.place} gave no heartbeat for so long that the others went on without it"
            )
        until, key = time.monotonic() + STAY_SECONDS, f"gone/{self.newest}"
        having = len(self._epoch.members) if self._epoch is not None else 0
        self.add(key, 1)
        while time.monotonic() < until and not self.posted(f"verdict/{self.newest}"):
            found = self.known
            if found is not None and not found.members and self.add(key) >= having:
                break  # all have left
            time.sleep(LOOK)
        raise Left(0)

    def _beats(self, members: Sequence[WorkerId]) -> dict[int, bytes]:
        """The newest heartbeat of each member, by ident."""
        raws = self._call("multi_get", [BEAT(member.ident) for member in members])
        return {member.ident: bytes(raw) for member, raw in zip(members, raws, strict=True)}

    def _warn_of_late(self, epoch: MembershipEpoch, before: dict[int, bytes], running: str) -> None:
        """Warn of the members that have not come to a rendezvous; the first of those that have come does it.
        before: their heartbeats when this worker came."""
        came = {member for member in epoch.members if self.posted(f"word/{epoch.number}/{member.ident}")}
        late = [member for member in epoch.members if member not in came]
        if not late or min(came, key=lambda member: member.place).ident != self.ident:
            return
        now = self._beats(late)
        who = "worker " + ", ".join(str(member.place) for member in late)
        where = f"{who} has not come to the rendezvous of {running} for {LATE_SECONDS:.0f} s"
        if any(now[member.ident] == before[member.ident] for member in late):
            what = "and not each of them gives heartbeats" if late[1:] else "and gives no heartbeat"
            does = "the launcher kills one that gives none after --dead-after"
        else:
            what = "but gives heartbeats: it may be busy with something else, or hang"
            does = "if it stays so, kill its process, and the others continue without it"
        warnings.warn(f"{where}, {what}; {does}", RuntimeWarning, stacklevel=2)

    def _beat(self) -> None:
        number = 0
        try:
            store = self.connect()
            while not self._over.wait(BEAT_SECONDS if number else 0):
                number += 1
                store.set(BEAT(self.ident), str(number))
        except (RuntimeError, WorkerError):
            self._lost = True

    def _watch(self) -> None:
        number = 0
        try:
            store = self.connect()
            while not self._over.is_set():
                key = f"membership/{number}"
                if not store.check([key]):
                    # Not with a short timeout, between heartbeats: torch warns about each one that is over.
                    store.wait([COMES(number, self.ident)], LONG)
                    continue
                found = MembershipEpoch.of(self.signer.verified(key, store.get(key), "the launcher"))
                if found.hard:
                    self._hard = number
                self.known = found
                number += 1
        except RuntimeError:
            self._lost = True
        except WorkerError as error:
            self._wrong, self._lost = str(error), True

    def _ring(self, key: str) -> None:
        self._call("set", key, "1")
        self.add("bell", 1)

    def _call(self, name: str, *arguments: Any) -> Any:
        try:
            return getattr(self._store, name)(*arguments)
        except RuntimeError as error:
            self._lost = True
            raise WorkerError(self._wrong) from error

    def _check(self) -> None:
        if self._lost:
            raise WorkerError(self._wrong)

    def _opened(self, key: str, raw: bytes, place: int) -> Any:
        return self.signer.verified(key, raw, f"worker {place}")


_link: LauncherLink | None = None


def company() -> LauncherLink:
    """The connection of this process to its launcher, whose workers are the ranks from now on.

    Raises PacelineError if no launcher of Paceline has started it."""
    global _link
    if _link is None:
        _link = LauncherLink(settings())
        peers.keep_company(_link)
    return _link
