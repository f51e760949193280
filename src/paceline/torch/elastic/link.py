"""A worker's connection to the store of its launcher: the meeting before each generation."""

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
from paceline.torch.elastic.generation import Generation, Where, told
from paceline.torch.elastic.messages import Seal, pack, unpack
from paceline.torch.elastic.news import News
from paceline.torch.elastic.spares import Spares

CONNECT_SECONDS = 60.0
START_SECONDS = 300.0  # for the other workers to get as far when the run begins
LOOK = 0.001  # seconds between two looks in a meeting
STAY_SECONDS = 5.0  # how long one that leaves waits for the others to let go of it, at most


def ending(ident: int) -> str:
    """The key that tells that a worker's program ends, and gives no more signs of life."""
    return f"ending/{ident}"


def has(ident: int) -> str:
    """The key that tells that a worker has the model."""
    return f"has/{ident}"


class Left(SystemExit):
    """This rank has left on purpose: its program ends in good order."""


class Link:
    """One of the workers of a run. Nothing here waits for a rank that is lost.

    Raises WorkerError, from any method, where the launcher has gone or has given this worker up.
    """

    def __init__(self, where: Where) -> None:
        self.ident, self.place, self.places = where.ident, where.place, where.places
        self._where, self.seal = where, Seal(where.secret)
        peers.let_forks_alone()
        self._store = self.connect()
        self.spares = Spares(self.connect)
        self._gathered = 0
        self._having: set[int] = set()  # who has the model, by the generation that this worker is in
        self._number = -1  # of that generation
        self._leaving = self._joined = self._closed = False
        atexit.register(self.close)  # what comes then may take longer than others wait for a sign of life
        self._news = News(self.connect, self.ident, self.seal)

    def connect(self) -> dist.TCPStore:
        """Another connection, for calls that may block."""
        host, port, *_ = self._where
        try:
            return dist.TCPStore(host, port, None, False, timedelta(seconds=CONNECT_SECONDS))
        except RuntimeError as error:
            raise WorkerError(f"no launcher answers at {host}:{port}; it may have ended") from error

    # -- what ``peers`` asks: before the first round, among those who began ---------------------------------------

    @property
    def rank(self) -> int:
        """This worker's place."""
        return self.place

    @property
    def ranks(self) -> int:
        """How many places there are."""
        return self.places

    def gather(self, item: Any) -> list[Any]:
        """What the worker of each place said at this point of its program; of one that joins later, all others' words
        are there already. Within the run nobody is waited for: the others may be elsewhere in their programs."""
        if self._having:
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

    # -- generations --------------------------------------------------------------------------------------------

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
        """The sums of this generation have failed."""
        self._ring(f"broken/{number}")

    def entered(self, generation: Generation) -> None:
        """This worker runs rounds in this generation."""
        if not self._having:
            self.post("begun")
            self.post(has(self.ident))
        self._having, self._number = {member.ident for member in generation.members}, generation.number
        self._call("add", f"entered/{generation.number}", 1)

    @property
    def begun(self) -> bool:
        """Whether anybody has run rounds before."""
        return self.posted("begun")

    def lost_since(self, number: int) -> bool:
        """Whether somebody was lost after this generation was made."""
        return self._news.hard > number or self._news.lost

    def newer(self, number: int) -> bool:
        """Whether there is a generation after this one."""
        return self._news.newest > number or self._news.lost

    @property
    def changed(self) -> bool:
        """Whether there is a generation after the one that this worker is in."""
        return self.newer(self._number)

    def next(self, number: int) -> Generation:
        """The newest generation after this one, as soon as there is one that holds this worker.

        Raises Left where this worker has left, once the others have let go of it."""
        while True:
            self._check()
            newest = self._news.newest
            if newest > number:
                found = self._news.generation(newest)
                assert found is not None
                if found.holds(self.ident):
                    return found
                if number >= 0:
                    self._go()
            if self._leaving and number < 0:
                raise Left(0)  # before it took part
            time.sleep(LOOK)

    def meet(self, generation: Generation, word: dict[str, Any]) -> dict[int, dict[str, Any]] | None:
        """What all members of a generation say of themselves, by ident, once all are there; None where a newer
        generation comes first. All get the same answer."""
        number, members = generation.number, generation.members
        mine = f"word/{number}/{self.ident}"
        self._call("set", mine, self.seal.closed(mine, word))
        self._call("add", f"arrived/{number}", 1)
        verdict = b""
        while not verdict:
            if self._call("add", f"arrived/{number}", 0) >= len(members):
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

    @property
    def first(self) -> bool:
        """Whether this worker is the first of the newest members that have the model."""
        found = self._news.generation(self._news.newest)
        if found is None:
            return False
        return self.ident == next((m.ident for m in found.members if m.ident in self._having), None)

    def arrive(self, key: str) -> None:
        """One more worker is at this point; once for each."""
        self.add(key, 1)

    def arrived(self, key: str) -> int:
        """How many are."""
        return self.add(key, 0)

    def post(self, key: str, words: Any = 1) -> None:
        """Tell all something that all can see. words: what JSON can tell."""
        self._call("set", key, self.seal.closed(key, words))

    def read(self, key: str) -> Any:
        """What somebody has told."""
        return self.seal.opened(key, self._call("get", key), "a worker")

    def posted(self, key: str) -> bool:
        """Whether somebody has told it."""
        return bool(self._call("check", [key]))

    def add(self, key: str, amount: int) -> int:
        """Add to a number that all share; what it comes to."""
        return int(self._call("add", key, amount))

    def forget(self, key: str) -> None:
        """Nobody asks for this key any more."""
        self._call("delete_key", key)

    def claim(self, key: str) -> int:
        """How many have asked for this key before."""
        return self.add(f"claim/{key}", 1) - 1

    def close(self) -> None:
        """No more signs of life. The second time does nothing."""
        if self._closed:
            return
        self._closed = True
        atexit.unregister(self.close)
        with suppress(RuntimeError):
            self._store.set(ending(self.ident), "1")
        self._news.close(self._store)

    # -- within ---------------------------------------------------------------------------------------------------

    def _go(self) -> None:
        """This worker is no member any more: its connections must outlive what the others still read from them."""
        if not self._leaving:
            raise WorkerError(
                f"worker {self.place} gave no sign of life for so long that the others went on without it"
            )
        news = self._news
        until, key = time.monotonic() + STAY_SECONDS, f"gone/{news.newest}"
        self.arrive(key)
        while time.monotonic() < until and not self.posted(f"verdict/{news.newest}"):
            found = news.generation(news.newest)
            if found is not None and not found.members and self.arrived(key) >= len(self._having):
                break  # all have left
            time.sleep(LOOK)
        raise Left(0)

    def _ring(self, key: str) -> None:
        self._call("set", key, "1")
        self._call("add", "bell", 1)

    def _call(self, name: str, *arguments: Any) -> Any:
        try:
            return getattr(self._store, name)(*arguments)
        except RuntimeError as error:
            self._news.lost = True
            raise WorkerError(self._news.wrong) from error

    def _check(self) -> None:
        if self._news.lost:
            raise WorkerError(self._news.wrong)

    def _told(self, key: str, raw: bytes, place: int) -> Any:
        return self.seal.opened(key, raw, f"worker {place}")


_link: Link | None = None


def company() -> Link:
    """The connection of this process to its launcher; its workers are the ranks from now on.

    Raises PacelineError where no launcher of ours has started it."""
    global _link
    if _link is None:
        _link = Link(told())
        peers.keep_company(_link)
    return _link
