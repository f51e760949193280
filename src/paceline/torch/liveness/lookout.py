"""Watches over the other ranks from threads of its own, and knows why this rank cannot go on.

One thread gives signs of life and reads those of the others; its requests hang while rank 0, which hosts them, is
stopped. The other thread judges what was read, and by when.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress

import torch.distributed as dist

from paceline.errors import WorkerError
from paceline.torch import peers
from paceline.torch.liveness import ends, patience
from paceline.torch.liveness.board import Board, Failure, Sight
from paceline.torch.liveness.calls import Calls
from paceline.torch.liveness.patience import Patience

_log = logging.getLogger(__name__)
REASON_SECONDS = 4.0  # for the reason of a broken connection to become known
STAY_SECONDS = 5.0  # how long rank 0 waits for others to hear of an end before it takes the board with it
POST_SECONDS = 2.0  # to tell the others of this rank's failure
QUICK = 0.02  # seconds between signs of life when others are to hear of a failure
WORDS = 500  # characters of an error that are told


class Reason(WorkerError):
    """Names the rank without which this one cannot go on."""


class _Named:
    """While it is entered, an error that only says that another rank is lost becomes one that names it."""

    def __init__(self, reason: Callable[[BaseException], WorkerError | None]) -> None:
        self._reason = reason

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, RuntimeError | WorkerError) and (reason := self._reason(error)) is not None:
            raise reason from error


class Alone:
    """One process: nobody to watch over."""

    def ended(self, step: int) -> None:
        """This rank has done its part of the round."""

    def over(self, seconds: float) -> None:
        """The round is over, after so many seconds."""

    def dropped(self) -> None:
        """The round was left unfinished, and is to be run again."""

    def named(self) -> AbstractContextManager[None]:
        """In here an error that only says that another rank is lost becomes a WorkerError that names it."""
        return _Named(self.reason)

    def reason(self, error: BaseException | None) -> WorkerError | None:
        """Why this rank lost the others; None where the error is one of its own. May take some seconds."""
        return None

    def known(self) -> WorkerError | None:
        """Why this rank need not wait for the others any more, where one of them has told; returns at once."""
        return None

    def fail(self, error: BaseException) -> None:
        """This rank cannot go on: tell the others, unless one of them is the reason."""

    def close(self) -> None:
        """End in good order. Safe to call twice."""


class Lookout(Alone):
    """Watches over the other ranks. Construct on all ranks."""

    def __init__(self, on_missed: patience.OnMissed, seconds: float) -> None:
        self._tell = patience.answer(on_missed)
        seconds = patience.check(seconds)
        self._rank, self._step, self._waits = peers.rank(), 0, False
        self._done = -1  # the newest round of which this rank has done its part
        self._pause = patience.pause(seconds, peers.ranks())
        self._patience = Patience(self._rank, seconds)
        self._board, self._calls = Board(self._pause), Calls("posts")
        self._sight = Sight()
        self._gone = False  # the connection to rank 0 is broken
        self._closing, self._hurry = threading.Event(), threading.Event()
        self._closed = self._posted = False
        self._beats = threading.Thread(target=self._beat, name="signs of life", daemon=True)
        self._judge = threading.Thread(target=self._watch, name="patience", daemon=True)
        self._beats.start()
        self._judge.start()
        ends.watch(self)

    def ended(self, step: int) -> None:
        self._done, self._step, self._waits = step, step, True

    def over(self, seconds: float) -> None:
        self._waits = False
        self._step += 1
        self._patience.round_over(seconds)

    def dropped(self) -> None:
        self._waits = False

    def reason(self, error: BaseException | None) -> WorkerError | None:
        if not lost(error):
            return None
        until = time.monotonic() + max(REASON_SECONDS, 8 * self._pause)
        while (found := self._found()) is None and time.monotonic() < until:
            time.sleep(QUICK)
        if found is None:
            return Reason(
                f"rank {self._rank} lost another rank in round {self._step}, and none has told why; look at what the "
                "launcher says of each rank: one that was killed says nothing"
            )
        self._post(found)  # the others may find this rank lost next, and are to hear of the same one
        return self._without(found)

    def known(self) -> WorkerError | None:
        failure = self._sight.failure
        return None if failure is None or failure.rank == self._rank else self._without(failure)

    def fail(self, error: BaseException) -> None:
        if not (lost(error) or isinstance(error, WorkerError)):
            words = f"{type(error).__name__}: {error}".splitlines()[0][:WORDS]
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
        ends.forget(self)

    def _without(self, failure: Failure) -> Reason:
        return Reason(f"rank {failure.rank} {failure.words}; rank {self._rank} cannot go on without it")

    def _leave(self) -> None:
        until, clock = time.monotonic() + STAY_SECONDS, _Clock(self._pause)
        self._board.beat(self._done, 0.0, ended=True)
        while self._rank == 0 and self._board.staying and time.monotonic() < until:
            time.sleep(min(self._pause, QUICK))
            self._board.beat(self._done, clock.awake(), ended=True)

    def _post(self, failure: Failure) -> None:
        """Tell the others; on rank 0, whose end takes the board with it, see that they hear of it."""
        if self._closed or self._posted or self._gone:
            return
        _log.info("rank %d tells the others that rank %d %s", self._rank, failure.rank, failure.words)
        self._posted = True  # also where another rank was quicker
        self._hurry.set()
        with suppress(RuntimeError, TimeoutError):  # rank 0 has gone, or does not answer
            self._calls.within(POST_SECONDS, self._board.fail, failure)
            until = time.monotonic() + STAY_SECONDS
            while self._rank == 0 and self._board.unheard and time.monotonic() < until:
                time.sleep(QUICK)

    def _found(self) -> Failure | None:
        """Who is lost and why, as far as is known yet."""
        sight, mine = self._sight, self._rank
        if sight.failure is not None and sight.failure.rank != mine:
            return sight.failure
        if silent := {since: rank for rank, since in sight.silent.items() if rank != mine}:
            words = f"has given no sign of life in round {self._step}; it may be killed, stopped or cut off"
            return Failure(silent[max(silent)], words)
        if self._gone and 0 not in sight.left:
            return Failure(
                0, f"has left the run in round {self._step} without a word; it may have been killed"
            )
        if left := [rank for rank in sight.left if rank != mine]:
            return Failure(left[0], f"has ended its program in round {self._step}")
        return None

    # -- in the threads --------------------------------------------------------------------------------------

    def _beat(self) -> None:
        clock = _Clock(self._pause)
        try:
            while True:
                self._sight = self._board.beat(self._done, clock.awake())
                over = 0 in self._sight.left or self._sight.failure is not None
                if (
                    over and self._rank != 0
                ):  # which waits until all know of it, and then takes the board with it
                    self._board.beat(self._done, 0.0, ended=True)
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
        clock = _Clock(self._pause)
        while not self._closing.wait(self._pause):
            missing = self._patience.judge(self._sight, self._step, self._waits, clock.awake())
            if missing is not None:
                _log.info("%s", missing)
                self._tell(missing)


class _Clock:
    """Counts seconds, but few of those in which this process itself stood still."""

    def __init__(self, pause: float) -> None:
        self._most, self._last = 3 * pause, time.monotonic()

    def awake(self) -> float:
        """Since the last call."""
        now = time.monotonic()
        seconds, self._last = now - self._last, now
        return min(seconds, self._most)


def lost(error: BaseException | None) -> bool:
    """Whether an error only says that a connection to another rank broke, or that it did not come in time."""
    if isinstance(error, WorkerError):
        return not isinstance(error, Reason) and lost(error.__cause__)
    return isinstance(error, dist.DistError) or (
        isinstance(error, RuntimeError) and any(word in str(error) for word in ("gloo", "NCCL", "ncclComm"))
    )


def lookout(on_missed: patience.OnMissed, seconds: float) -> Alone:
    """What watches over the ranks of this process group. Collective."""
    return Lookout(on_missed, seconds) if peers.ranks() > 1 else Alone()
