"""Where the ranks tell that they live, how far they are and why one failed: a store that rank 0 hosts.

Rank 0 looks at the signs of life of all the others, and writes what is remarkable in one place that all read. So a
look costs each rank two requests, however many ranks there are, and rank 0 itself is judged by whether it looks.
"""

from __future__ import annotations

import json
from typing import Any, NamedTuple

from paceline.torch import peers

CONNECT_SECONDS = 60.0  # to reach the store
MOST_NAMED = 16  # ranks of each kind
AFTER = 3  # looks, and pauses between signs of life, without a new one: the rank is worth telling of
LOOK, FAILURE = "look", "failure"


class Failure(NamedTuple):
    """Why a rank cannot go on."""

    rank: int
    words: str  # what follows its name in a sentence


class Sight(NamedTuple):
    """What is known of the others."""

    number: int = 0  # of rank 0's look: it stands still while rank 0 does
    silent: dict[int, float] = {}  # noqa: RUF012  # seconds without a sign of life, by rank; never changed
    least: int = -1  # the newest round of which all ranks have done their part
    late: tuple[int, ...] = ()  # the ranks that have done their part of no later one
    left: tuple[int, ...] = ()  # ranks that have ended in good order
    failure: Failure | None = None  # the first that was told


class Life(NamedTuple):
    """A rank's sign of life."""

    number: int
    done: int = -1  # the newest round of which the rank has done its part
    ended: bool = False  # in good order
    heard: bool = False  # it knows of the failure


class Board:
    """This rank's connection. Every method may hang while rank 0 is stopped, and raises RuntimeError when rank 0
    has gone. Constructing it is collective. pause: seconds between two signs of life."""

    def __init__(self, pause: float) -> None:
        self._rank, self._ranks = peers.rank(), peers.ranks()
        lives = {_life(rank): json.dumps(Life(0)) for rank in range(self._ranks)}
        self._store = peers.own_store(CONNECT_SECONDS, {LOOK: "{}", FAILURE: "null", **lives})
        self._mine = Life(0)
        self._silence = Silence(self._ranks, AFTER * pause)
        self.unheard: set[int] = set(
            range(self._ranks)
        )  # on rank 0: who may live and not know of the failure
        self.staying: set[int] = set(range(self._ranks))  # on rank 0: who may live and has not ended

    def beat(self, done: int, seconds: float, ended: bool = False) -> Sight:
        """Give a sign of life and see what is known of the others.

        done: the newest round of which this rank has done its part. seconds: since the last call, as far as this
        process was awake. ended: this is the last sign, but for rank 0's.
        """
        number = self._mine.number + 1
        self._mine = self._mine._replace(number=number, done=done, ended=ended)
        self._store.set(_life(self._rank), json.dumps(self._mine))
        if self._rank == 0:
            self._look(seconds)
        look, failure = (json.loads(bytes(raw)) for raw in self._store.multi_get([LOOK, FAILURE]))
        self._mine = self._mine._replace(heard=failure is not None)
        return _sight(look, failure)

    def fail(self, failure: Failure) -> None:
        """Tell why a rank cannot go on; the first to be told of is remembered."""
        self._store.compare_set(FAILURE, "null", json.dumps(failure))

    def _look(self, seconds: float) -> None:
        raws = self._store.multi_get([_life(rank) for rank in range(self._ranks)])
        lives = [Life(*json.loads(bytes(raw))) for raw in raws]
        left = [rank for rank, life in enumerate(lives) if life.ended]
        silent = self._silence.look([life.number for life in lives], seconds)
        silent = [(rank, since) for rank, since in silent if rank not in left]
        least = min((life.done for life in lives if not life.ended), default=-1)
        late = [rank for rank, life in enumerate(lives) if life.done == least and not life.ended]
        self.staying = set(range(self._ranks)) - set(left) - {rank for rank, _ in silent}
        self.unheard = {rank for rank in self.staying if not lives[rank].heard}
        look = {
            "number": self._mine.number,
            "silent": silent[:MOST_NAMED],
            "least": least,
            "late": late[:MOST_NAMED],
            "left": left,
        }
        self._store.set(LOOK, json.dumps(look))


class Silence:
    """For how long each rank's count of its signs of life has stood still, as rank 0 sees it.

    least: seconds of that, and ``AFTER`` looks, that are worth telling of.
    """

    def __init__(self, ranks: int, least: float) -> None:
        self._least = least
        self._numbers, self._seconds, self._looks = [0] * ranks, [0.0] * ranks, [0] * ranks

    def look(self, numbers: list[int], seconds: float) -> list[tuple[int, float]]:
        """(rank, seconds) of those that are worth telling of, the longest first. seconds: since the last look."""
        for rank, (before, now) in enumerate(zip(self._numbers, numbers, strict=True)):
            still = now == before
            self._seconds[rank] = self._seconds[rank] + seconds if still else 0.0
            self._looks[rank] = self._looks[rank] + 1 if still else 0
        self._numbers = numbers
        found = [
            (rank, since)
            for rank, (since, looks) in enumerate(zip(self._seconds, self._looks, strict=True))
            if looks >= AFTER and since >= self._least
        ]
        return sorted(found, key=lambda pair: -pair[1])


def _life(rank: int) -> str:
    return f"life/{rank}"


def _sight(look: dict[str, Any], failure: Any) -> Sight:
    told = None if failure is None else Failure(*failure)
    if not look:
        return Sight(failure=told)
    return Sight(
        look["number"],
        {int(rank): float(seconds) for rank, seconds in look["silent"]},
        look["least"],
        tuple(look["late"]),
        tuple(look["left"]),
        told,
    )
