"""A worker's connection to its launcher: signs of life, what all members can see, and their rendezvous."""

from __future__ import annotations

import atexit
import base64
import threading
import time
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from paceline.errors import PacelineError, WorkerError
from paceline.torch import peers
from paceline.torch.elastic.group import ConnectionPool
from paceline.torch.elastic.membership import BEAT, COMES, ENDING, HAS, MembershipEpoch, Where, told
from paceline.torch.elastic.messages import Seal, pack, unpack
from paceline.torch.liveness.detector import BEAT_SECONDS

CONNECT_SECONDS = 60.0
START_SECONDS = 300.0  # for the other workers to get as far when the run begins
LOOK = 0.001  # seconds between two looks in a rendezvous
STAY_SECONDS = 5.0  # how long one that leaves waits for the others to let go of it, at most
LONG = timedelta(days=30)
CLOSE_SECONDS = 2.0  # that a thread may take to end, as when the launcher stands still


class Left(SystemExit):
    """This rank has left on purpose: its program ends in good order."""


class Link:
    """One of the workers of a run, which gives signs of life, and hears of membership epochs, in a thread for each.
    Nothing here waits for a rank that is lost.

    Raises WorkerError, from any method, if the launcher has gone or has given this worker up.
    """

    def __init__(self, where: Where) -> None:
        self.ident, self.place, self.places = where.ident, where.place, where.places
        self.rank, self.ranks = where.place, where.places  # as ``peers`` asks for them
        self._where, self.seal = where, Seal(where.secret)
        peers.let_forks_alone()
        self._store = self.connect()
        self.connections = ConnectionPool(self.connect)
        self._gathered = 0
        self._epoch: MembershipEpoch | None = None  # that this worker is in: its members have the model
        self._leaving = self._joined = False
        self.known: MembershipEpoch | None = None  # the newest
        self._hard = -1  # number of the newest of those that are hard
        self._lost = False  # the launcher has gone, or ``_wrong`` says what else
        self._wrong = "the launcher, which keeps the ranks together, has gone"
        self._over = threading.Event()
        atexit.register(self.close)  # what comes then may take longer than others wait for a sign of life
        threads = (("signs of life", self._beat), ("membership", self._watch))
        self._threads = [threading.Thread(target=target, name=name, daemon=True) for name, target in threads]
        for thread in self._threads:
            thread.start()

    def connect(self) -> dist.TCPStore:
        """Another connection, for calls that may block."""
        host, port, *_ = self._where
        try:
            return dist.TCPStore(host, port, None, False, timedelta(seconds=CONNECT_SECONDS))
        except RuntimeError as error:
            raise WorkerError(f"no launcher answers at {host}:{port}; it may have ended") from error

    def close(self) -> None:
        """No more signs of life. The second time does nothing.

        A thread that is in a call of torch's while Python ends would abort the process."""
        if self._over.is_set():
            return
        with suppress(RuntimeError):
            self._store.set(ENDING(self.ident), "1")
        self._over.set()
        atexit.unregister(self.close)
        with suppress(RuntimeError):
            self._store.set(COMES(self.newest + 1, self.ident), "")  # what a thread waits for
        for thread in self._threads:
            thread.join(CLOSE_SECONDS)

    # -- before the first round, among those who began ------------------------------------------------------------

    def gather(self, item: Any) -> list[Any]:
        """What the worker of each place said at this point of its program; of one that joins later, all others' words
        are there already. Within the run nobody is waited for: the others may be elsewhere in their programs."""
        if self._epoch is not None:
            return [item] * self.places
        number, self._gathered = self._gathered, self._gathered + 1
        keys = [f"said/{number}/{place}" for place in range(self.places)]
        try:
            said = base64.b64encode(pack(item)).decode()
            self._store.set(keys[self.place], self.seal.closed(keys[self.place], said))
            self._store.wait(keys, timedelta(seconds=START_SECONDS))
            raws = self._store.multi_get(keys)
        except RuntimeError as error:
            raise WorkerError(
                f"worker {self.place} waited {START_SECONDS:.0f} s for all others to begin, or lost the launcher"
            ) from error
        told = [self._told(key, raw, place) for place, (key, raw) in enumerate(zip(keys, raws, strict=True))]
        return [
            unpack(base64.b64decode(each), f"what worker {place} tells") for place, each in enumerate(told)
        ]

    # -- what all members can see ---------------------------------------------------------------------------------

    def post(self, key: str, words: Any = 1) -> None:
        """Tell all something that all can see. words: what JSON can tell."""
        self._call("set", key, self.seal.closed(key, words))

    def posted(self, key: str) -> bool:
        """Whether somebody has told it."""
        return bool(self._call("check", [key]))

    def add(self, key: str, amount: int = 0) -> int:
        """Add to a number that all share; what it comes to."""
        return int(self._call("add", key, amount))

    def forget(self, key: str) -> None:
        """Nobody asks for this key any more."""
        self._call("delete_key", key)

    # -- membership epochs ----------------------------------------------------------------------------------------

    def join(self) -> None:
        """From now on this worker can take part. Raises PacelineError the second time."""
        if self._joined:
            raise PacelineError("elastic=True was given to two Paces of one process; expected it once")
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
        """Whether somebody was lost after this epoch was made."""
        return self._hard > number or self._lost

    def newer(self, number: int) -> bool:
        """Whether there is an epoch after this one."""
        return self.newest > number or self._lost

    @property
    def first(self) -> bool:
        """Whether this worker is the first of the newest members that have the model; if all were told to leave when
        no round was left to begin, of those that were there then."""
        found, mine = self.known, self._epoch
        if found is None or mine is None:
            return False
        newest = [member for member in found.members or mine.members if member in mine.members]
        return bool(newest) and newest[0].ident == self.ident

    def next(self, number: int) -> MembershipEpoch:
        """The newest epoch after this one, as soon as there is one that holds this worker.

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

    def meet(self, epoch: MembershipEpoch, word: dict[str, Any]) -> dict[int, dict[str, Any]] | None:
        """What all members of an epoch say of themselves, by ident, once all are there; None if a newer epoch comes
        first. All get the same answer."""
        number, members = epoch.number, epoch.members
        self.post(f"word/{number}/{self.ident}", word)
        self.add(f"arrived/{number}", 1)
        verdict = b""
        while not verdict:
            if self.add(f"arrived/{number}") >= len(members):
                verdict = self._call("compare_set", f"verdict/{number}", "", "go")
            elif self.newer(number):
                verdict = self._call("compare_set", f"verdict/{number}", "", "skip")
            else:
                time.sleep(LOOK)
            self._check()
        if verdict != b"go":
            return None
        keys = [f"word/{number}/{member.ident}" for member in members]
        every = zip(members, keys, self._call("multi_get", keys), strict=True)
        return {member.ident: self._told(key, raw, member.place) for member, key, raw in every}

    # -- within ---------------------------------------------------------------------------------------------------

    def _go(self) -> None:
        """This worker is no member any more: its connections must outlive what the others still read from them."""
        if not self._leaving:
            raise WorkerError(
                f"worker {self.place} gave no sign of life for so long that the others went on without it"
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
                    # Not with a short timeout, to give signs of life in between: torch warns of each that is over.
                    store.wait([COMES(number, self.ident)], LONG)
                    continue
                found = MembershipEpoch.of(self.seal.opened(key, store.get(key), "the launcher"))
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

    def _told(self, key: str, raw: bytes, place: int) -> Any:
        return self.seal.opened(key, raw, f"worker {place}")


_link: Link | None = None


def company() -> Link:
    """The connection of this process to its launcher; its workers are the ranks from now on.

    Raises PacelineError if no launcher of ours has started it."""
    global _link
    if _link is None:
        _link = Link(told())
        peers.keep_company(_link)
    return _link
