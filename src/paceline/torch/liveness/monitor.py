"""Watches the other ranks of a process group from its own threads, and finds out why this rank cannot continue.

Ranks post heartbeats, their progress and the reason of a failure in a store that rank 0 hosts. Rank 0
looks at the heartbeats of all the others, and writes a summary to one key that all read. So a look costs each rank
two requests, however many ranks there are, and rank 0 itself is judged by whether it looks.

One thread gives heartbeats and reads the summary; its requests hang while rank 0 is stopped. The other thread
decides from what was read, and when, which ranks are missing.
"""

from __future__ import annotations

import atexit
import json
import logging
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from types import TracebackType
from typing import NamedTuple

import torch.distributed as dist

from paceline.errors import WorkerError
from paceline.torch import peers
from paceline.torch.liveness import stall
from paceline.torch.liveness.calls import Calls
from paceline.torch.liveness.detector import Awake, FailureDetector
from paceline.torch.liveness.stall import Failure, Stall, StallTimeout, View

_log = logging.getLogger(__name__)
CONNECT_SECONDS = 60.0  # to reach the store
MOST_NAMED = 16  # ranks of each kind in a summary
AFTER = 2  # pauses between heartbeats without a new one until the summary names a rank
LOOK, FAILURE = "look", "failure"  # keys of rank 0's summary, and of the first failure
REASON_SECONDS = 4.0  # until the reason of a broken connection is known, at most
STAY_SECONDS = 5.0  # that rank 0, whose end closes the store, waits until the others know of an end
POST_SECONDS = 2.0  # to post this rank's failure
QUICK = 0.02  # seconds between heartbeats while a failure spreads, or a rank is lost
WORDS = 500  # characters of an error that are posted


class Heartbeat(NamedTuple):
    """A rank's heartbeat."""

    number: int
    done: int = -1  # the newest round of which the rank has done its part
    ended: bool = False  # in good order
    informed: bool = False  # the rank knows of the failure


class Reason(WorkerError):
    """An error that names the rank without which this one cannot continue."""


class Alone:
    """The monitor of a single process, which watches no other."""

    explain: Callable[[BaseException], str]
    where: Callable[[], tuple[int, bool]] = staticmethod(lambda: (0, False))

    def follow(self, explain: Callable[[BaseException], str], where: Callable[[], tuple[int, bool]]) -> None:
        """The loop of this rank is ready.

        explain: called with an error that ends the program, before it is posted; gives other words for it, or an
        empty text. where: gives the round that this rank is in, and whether it has done its part of it; called from a
        thread."""
        self.explain, self.where = explain, where

    def reason(self, error: BaseException | None) -> WorkerError | None:
        """Why this rank lost the others; None if the error is its own. May take some seconds."""
        return None

    def known(self) -> WorkerError | None:
        """The posted reason why this rank need not wait for the others any more, or None; returns at once."""
        return None

    def fail(self, error: BaseException) -> None:
        """This rank cannot continue: inform the others, unless one of them is the reason."""
        self.explain(error)

    def close(self) -> None:
        """End in good order. Safe to call twice."""


class Monitor(Alone):
    """The monitor of a process group, which watches the other ranks. Construct it on all ranks."""

    def __init__(self, reaction: Stall) -> None:
        self._reaction, seconds = reaction, float(reaction.patience)
        self._rank, ranks = peers.rank(), range(peers.ranks())
        self._pause = stall.pause(seconds, len(ranks))
        self._stall = StallTimeout(self._rank, seconds)
        self._keys = [f"beat/{rank}" for rank in ranks]
        first = {LOOK: json.dumps((0, [], -1, (), ())), FAILURE: "null"}
        # Each call may hang while rank 0 is stopped, and raises RuntimeError when rank 0 has gone.
        self._store = peers.own_store(
            CONNECT_SECONDS, first | dict.fromkeys(self._keys, json.dumps(Heartbeat(0)))
        )
        self._calls = Calls("posts")
        self._mine, self._view = Heartbeat(0), View()
        self._detector = FailureDetector(AFTER * self._pause, self._pause)
        self._uninformed = set(ranks)  # on rank 0: the ranks that may live and do not know of the failure
        self._staying = set(ranks)  # on rank 0: the ranks that may live and have not ended
        self._gone = False  # the connection to rank 0 is broken
        self._closing, self._hurry = threading.Event(), threading.Event()
        self._closed = self._posted = False
        self._beats = threading.Thread(target=self._beat, name="heartbeats", daemon=True)
        self._judge = threading.Thread(target=self._watch, name="stall timeout", daemon=True)
        self._beats.start()
        self._judge.start()
        _watch_end(self)

    @property
    def _step(self) -> int:
        """The round that this rank is in."""
        return self.where()[0]

    @property
    def _done(self) -> int:
        """The newest round of which this rank has done its part."""
        step, done = self.where()
        return step if done else step - 1

    def reason(self, error: BaseException | None) -> WorkerError | None:
        if not lost(error):
            return None
        self._hurry.set()  # so that a rank without heartbeats is found soon
        until = time.monotonic() + max(REASON_SECONDS, 8 * self._pause)
        while (found := self._found()) is None and time.monotonic() < until:
            time.sleep(QUICK)
        if found is None:
            return Reason(
                f"rank {self._rank} lost another rank in round {self._step}, and none has reported why; look at what "
                "the launcher prints for each rank: one that was killed prints nothing itself"
            )
        self._post(found)  # otherwise the others may blame this rank, which they lose next
        return self._without(found)

    def known(self) -> WorkerError | None:
        failure = self._view.failure
        return None if failure is None or failure.rank == self._rank else self._without(failure)

    def fail(self, error: BaseException) -> None:
        words = self.explain(error)
        if not (lost(error) or isinstance(error, WorkerError)):
            words = words or f"{type(error).__name__}: {error}".splitlines()[0][:WORDS]
            self._post(Failure(self._rank, f"failed in round {self._step}: {words}"))

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._closing.set()
        self._hurry.set()
        self._judge.join(POST_SECONDS)
        self._beats.join(POST_SECONDS)
        if not (self._gone or self._posted or self._beats.is_alive()):
            with suppress(RuntimeError, TimeoutError):
                self._calls.within(STAY_SECONDS + POST_SECONDS, self._leave)
        self._calls.close()
        _forget_end(self)

    def _without(self, failure: Failure) -> Reason:
        return Reason(f"rank {failure.rank} {failure.words}; rank {self._rank} cannot continue without it")

    def _leave(self) -> None:
        until = time.monotonic() + STAY_SECONDS
        self._live(ended=True)
        while self._rank == 0 and self._staying and time.monotonic() < until:
            time.sleep(min(self._pause, QUICK))
            self._live(ended=True)

    def _post(self, failure: Failure) -> None:
        """Post a failure; on rank 0, whose end closes the store, wait until the others have read it."""
        if self._closed or self._posted or self._gone:
            return
        _log.info("rank %d reports to the others that rank %d %s", self._rank, failure.rank, failure.words)
        self._posted = True  # also if another rank was faster
        self._hurry.set()
        with suppress(RuntimeError, TimeoutError):  # rank 0 has gone, or does not answer
            words = json.dumps(failure)  # only the first failure is stored
            self._calls.within(POST_SECONDS, self._store.compare_set, FAILURE, "null", words)
            until = time.monotonic() + STAY_SECONDS
            while self._rank == 0 and self._uninformed and time.monotonic() < until:
                time.sleep(QUICK)

    def _found(self) -> Failure | None:
        """The lost rank and the reason, as far as they are known yet."""
        view, mine = self._view, self._rank
        if view.failure is not None and view.failure.rank != mine:
            return view.failure
        if silent := {since: rank for rank, since in view.silent.items() if rank != mine}:
            words = f"has given no heartbeat in round {self._step}; it may be killed, stopped or cut off"
            return Failure(silent[max(silent)], words)
        if self._gone and 0 not in view.left:
            return Failure(
                0, f"has left the run in round {self._step} without a reason; it may have been killed"
            )
        if left := [rank for rank in view.left if rank != mine]:
            return Failure(left[0], f"has ended its program in round {self._step}")
        return None

    # -- in the threads --------------------------------------------------------------------------------------

    def _live(self, ended: bool = False) -> View:
        """Give a heartbeat and read what is known of the others. ended: this rank has ended in good order."""
        self._mine = self._mine._replace(number=self._mine.number + 1, done=self._done, ended=ended)
        self._store.set(self._keys[self._rank], json.dumps(self._mine))
        if self._rank == 0:
            self._look()
        look, failure = (json.loads(bytes(raw)) for raw in self._store.multi_get([LOOK, FAILURE]))
        self._mine = self._mine._replace(informed=failure is not None)
        number, silent, least, late, left = look
        posted = None if failure is None else Failure(*failure)
        return View(number, dict(silent), least, tuple(late), tuple(left), posted)

    def _look(self) -> None:
        beats = [Heartbeat(*json.loads(bytes(raw))) for raw in self._store.multi_get(self._keys)]
        there = {rank: beat for rank, beat in enumerate(beats) if not beat.ended}
        found = self._detector.silent(time.monotonic(), {rank: beat.number for rank, beat in there.items()})
        silent = sorted(found.items(), key=lambda pair: -pair[1])  # the longest first
        least = min((beat.done for beat in there.values()), default=-1)
        late = [rank for rank, beat in there.items() if beat.done == least]
        self._staying = set(there) - set(found)
        self._uninformed = {rank for rank in self._staying if not beats[rank].informed}
        left = [rank for rank, beat in enumerate(beats) if beat.ended]
        look = self._mine.number, silent[:MOST_NAMED], least, late[:MOST_NAMED], left
        self._store.set(LOOK, json.dumps(look))

    def _beat(self) -> None:
        try:
            while True:
                self._view = self._live()
                over = 0 in self._view.left or self._view.failure is not None
                if over and self._rank:  # rank 0 waits until all know of it, and then closes the store
                    self._live(ended=True)
                    self._gone = True
                    return
                hurries = self._hurry.wait(self._pause)
                if self._closing.is_set():
                    return
                if hurries:
                    time.sleep(min(self._pause, QUICK))
        except RuntimeError:
            self._gone = True

    def _watch(self) -> None:
        awake = Awake(self._pause, time.monotonic())
        while not self._closing.wait(self._pause):
            seconds = awake.since(time.monotonic())
            missing = self._stall.judge(self._view, *self.where(), seconds)
            if missing is not None:
                _log.info("%s", missing)
                self._reaction.react(missing)


def lost(error: BaseException | None) -> bool:
    """Whether an error only says that a connection to another rank broke, or that the rank did not come in time."""
    if isinstance(error, WorkerError):
        return not isinstance(error, Reason) and lost(error.__cause__)
    return isinstance(error, dist.DistError) or (
        isinstance(error, RuntimeError) and any(word in str(error) for word in ("gloo", "NCCL", "ncclComm"))
    )


def monitor(reaction: Stall) -> Alone:
    """The monitor of the ranks of this process group. Collective."""
    return Monitor(reaction) if peers.ranks() > 1 else Alone()


# -- the end of a program that does not close its monitor: by an uncaught exception, or at its last line -------------

_watched: weakref.WeakSet[Monitor] = weakref.WeakSet()
_before = sys.excepthook
os.register_at_fork(after_in_child=_watched.clear)  # the end of a forked process does not concern the run


def _watch_end(monitor: Monitor) -> None:
    global _before
    if sys.excepthook is not _uncaught:
        _before, sys.excepthook = sys.excepthook, _uncaught
        atexit.register(_end)
    _watched.add(monitor)


def _forget_end(monitor: Monitor) -> None:
    _watched.discard(monitor)
    if not _watched and sys.excepthook is _uncaught:
        sys.excepthook = _before


def _uncaught(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    open_ones = list(_watched)
    for one in open_ones:
        one.fail(error)
    _before(kind, error, trace)
    for one in open_ones:
        if (reason := one.reason(error)) is not None:
            stall.last_words(str(reason))


def _end() -> None:
    for one in list(_watched):
        one.close()
