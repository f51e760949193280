"""The stall timeout: finds the ranks that keep the others waiting, long before a collective's own timeout.

A rank that gives no heartbeat is stopped or cut off, and is missing after ``patience`` seconds. A rank that lives
may compile, evaluate or write a checkpoint: it is missing only after many times that, and many times a round's time.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from paceline.errors import PacelineError, number, short

SECONDS = 30.0  # of patience by default: without a heartbeat until a rank is missing
LIVING = 10.0  # times the patience, and
TIMES = 10.0  # times the longest of the recent rounds, until a rank that lives is missing
RECENT = 20  # rounds
LONGEST_PAUSE = 2.0  # seconds between two heartbeats; shorter once a rank has lost another one
GROWTH = 2.0  # the same ranks are reported again after this many times the wait before


class Failure(NamedTuple):
    """Why a rank cannot continue."""

    rank: int
    words: str  # the predicate of a sentence about the rank


class View(NamedTuple):
    """This rank's knowledge of the other ranks."""

    number: int = 0  # of rank 0's look; it does not grow while rank 0 is stopped
    silent: dict[int, float] = {}  # noqa: RUF012  # seconds without a heartbeat, by rank; never changed
    least: int = -1  # the newest round of which all ranks have done their part
    late: tuple[int, ...] = ()  # the ranks that have done their part of no later one
    left: tuple[int, ...] = ()  # ranks that have ended in good order
    failure: Failure | None = None  # the first that was posted


class Missing(NamedTuple):
    """Ranks that this rank cannot continue without; as a string, a sentence about them."""

    round: int  # that this rank is in
    ranks: list[int]
    seconds: float  # since their last heartbeat; since this rank's own part of the round, if they live
    lives: bool  # they give heartbeats
    failure: Failure | None = None  # why they cannot continue, if they posted that

    @property
    def words(self) -> str:
        """The missing ranks, and since when they are missing, as a clause."""
        who = named(self.ranks)
        if self.failure is not None:
            return f"{who} {self.failure.words}"
        if self.lives:
            return (
                f"{who} has not ended its part of round {self.round} {self.seconds:.0f} s after this rank did, but "
                "gives heartbeats: it may be busy with something else, or hang"
            )
        return (
            f"{who} has given no heartbeat for {self.seconds:.0f} s in round {self.round}: it may be stopped, "
            "dead or cut off"
        )

    def __str__(self) -> str:
        stays = "" if self.failure is not None else "if it stays so, "
        return f"{self.words}; {stays}end the run and continue from the last checkpoint"


@dataclass(frozen=True)
class Stall:
    """The reaction to ranks that keep the others waiting.

    Attributes:
        do: "warn" names the rank in a warning, again after twice the time. "end" names it on standard error and ends
            the process with status 1, so that a launcher can start the ranks again. A function is called from a
            thread with a ``Missing``.
        patience: Seconds without a heartbeat after which a rank is missed. A rank that lives and is only late is
            missed after ten times that, and ten times as long as rounds take: it may compile, evaluate or write a
            checkpoint.

    Raises:
        PacelineError: ``do`` is none of these, or ``patience`` is not a positive number.
    """

    do: str | Callable[[Missing], object] = "warn"
    patience: float = SECONDS

    def __post_init__(self) -> None:
        if not callable(self.do) and not (isinstance(self.do, str) and self.do in REACTIONS):
            raise PacelineError(f"stall={short(self.do)}: expected 'warn', 'end', a function or a Stall(...)")
        check(self.patience)

    @classmethod
    def of(cls, stall: Reaction) -> Stall:
        """``stall``, or a ``Stall`` with this reaction. Raises PacelineError for anything else."""
        return stall if isinstance(stall, Stall) else cls(stall)

    def react(self, missing: Missing) -> None:
        """React to the missing ranks."""
        (self.do if callable(self.do) else REACTIONS[self.do])(missing)


# What the ``stall`` of a Pace may be; the first two are short for a ``Stall``.
Reaction = str | Callable[[Missing], object] | Stall


def named(ranks: list[int]) -> str:
    """The ranks in a sentence: "rank 1" or "rank 1, 2"."""
    return "rank " + ", ".join(str(r) for r in ranks)


def warn(missing: Missing) -> None:
    """Name the ranks in a warning."""
    warnings.warn(str(missing), RuntimeWarning, stacklevel=2)


def end(missing: Missing) -> None:
    """Name the ranks on standard error and end this process: nothing else frees it if it waits in a reduction."""
    last_words(str(missing))
    os._exit(1)


def last_words(sentence: str) -> None:
    """Print why this process ends on standard error, since messages that log handlers still buffer may be lost."""
    sys.stderr.write(f"paceline: {sentence}\n")
    sys.stderr.flush()


REACTIONS: dict[str, Callable[[Missing], object]] = {"warn": warn, "end": end}


def check(patience: float) -> float:
    """The patience in seconds. Raises PacelineError if it is not a positive number."""
    number("patience", patience, "a positive number of seconds; inf is for ever", lambda seconds: seconds > 0)
    return float(patience)


class StallTimeout:
    """Decides which ranks are missing, from a sequence of views of the other ranks.

    rank: this one. seconds: without a heartbeat until a rank is missing.
    """

    def __init__(self, rank: int, seconds: float = SECONDS) -> None:
        self._rank, self._patience = rank, seconds
        self._rounds: deque[float] = deque(maxlen=RECENT)  # seconds that this rank was in each
        self._step, self._since = -1, 0.0  # the round that it is in, and for how long
        self._look, self._quiet = -1, 0.0  # rank 0's newest look at the others, and the seconds since
        self._waited = 0.0  # seconds since this rank has done its part of the round, while others had not
        self._failed = 0.0  # seconds since a rank posted its failure
        self._reported: tuple[list[int], bool] | None = None  # ``ranks`` and ``lives`` of the newest report
        self._again = 0.0  # seconds of being missing at which the same ranks are reported again

    def judge(self, view: View, step: int, waits: bool, seconds: float) -> Missing | None:
        """The ranks to report as missing now; None if there are none.

        step: the round that this rank is in; waits: it has done its part. seconds: since the last call, as far as
        this process was awake: after its own pause it must not blame the others.
        """
        self._since += seconds
        if step != self._step:
            self._rounds.append(self._since)
            self._step, self._since = step, 0.0
        stopped = view.number == self._look and self._rank != 0
        self._quiet = self._quiet + seconds if stopped else 0.0
        self._look = view.number
        self._waited = self._waited + seconds if waits and view.least < step else 0.0
        self._failed = self._failed + seconds if view.failure is not None else 0.0
        missing = self._missing(view, step)
        if missing is None:
            self._reported = None
            return None
        key = missing.ranks, missing.lives
        if key == self._reported and missing.seconds < self._again:
            return None
        self._reported, self._again = key, GROWTH * missing.seconds
        return missing

    def _missing(self, view: View, step: int) -> Missing | None:
        if view.failure is not None:
            if self._failed < self._patience or view.failure.rank == self._rank:
                return None
            return Missing(step, [view.failure.rank], self._failed, False, view.failure)
        if self._quiet >= self._patience:  # rank 0's look at the others is too old
            return None if 0 in view.left else Missing(step, [0], self._quiet, False)
        silent = {r: s for r, s in view.silent.items() if s >= self._patience and r != self._rank}
        if silent:
            return Missing(step, sorted(silent), max(silent.values()), False)
        longest = max(self._rounds, default=0.0)
        late = [rank for rank in view.late if rank != self._rank]
        if late and self._waited >= max(LIVING * self._patience, TIMES * longest):
            return Missing(step, late, self._waited, True)
        return None


def pause(patience: float, ranks: int) -> float:
    """Seconds between two heartbeats: several within the patience, but so few that they are no load for any rank,
    nor for rank 0 if there are many ranks: a sign costs some tenths of a millisecond."""
    return max(min(LONGEST_PAUSE, patience / 15), ranks / 1000)
