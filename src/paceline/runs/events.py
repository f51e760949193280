"""What happened to the workers of a run that goes on without the lost: who, when, and what it cost."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from paceline.runs.run import Run
from paceline.runs.words import listing, plural, seconds

MOST = 5  # that are told one by one
NEWEST = 3  # of a run that is watched
NAMED = 8  # workers that ran a lost one's samples
JOINED = "joined"
_SAID = re.compile(r"worker (\d{1,9}) (.+)", re.DOTALL)


class Happened(NamedTuple):
    """worker: -1 if the record names none. what: follows its name in a sentence. seconds: what it cost."""

    round: int
    worker: int
    what: str
    seconds: float

    @property
    def joined(self) -> bool:
        """Whether the worker came; else it was lost or left."""
        return self.what == JOINED

    def __str__(self) -> str:
        return f"worker {self.worker} {self.what}" if self.worker >= 0 else self.what


def events(run: Run) -> list[Happened]:
    """All that the record tells of, in its order."""
    found = []
    for number, told in zip(run.round.tolist(), run.extras.get("events") or (), strict=False):
        for event in told or ():
            if isinstance(event, dict) and isinstance(what := event.get("what"), str):
                cost = event.get("seconds_lost")
                lost = float(cost) if isinstance(cost, int | float) and np.isfinite(cost) else 0.0
                said = _SAID.fullmatch(what)
                worker, words = (int(said[1]), said[2]) if said else (-1, what)
                found.append(Happened(number, worker, words, max(lost, 0.0)))
    return found


def sentences(run: Run) -> list[str]:
    """Who was lost, when, what it cost and who ran its samples: each of a few, or how many and the worst."""
    lost = [event for event in events(run) if not event.joined]
    if len(lost) <= MOST:
        return [f"{_sentence(event)}, and no sample{_ran_by(run, event)}." for event in lost]
    return [f"{_many(lost)}, and no sample."]


def brief(run: Run) -> str:
    """The same in a few words beside other runs; empty if nobody was lost."""
    lost = [event for event in events(run) if not event.joined]
    return f"{_many(lost)}." if lost else ""


def newest(found: Sequence[Happened]) -> list[str]:
    """For a run that is watched: what became of the workers that were lost last."""
    lost = [event for event in found if not event.joined]
    told = []
    for event in reversed(lost[-NEWEST:]):
        after = (each for each in found[found.index(event) :] if each.worker == event.worker and each.joined)
        back = next(after, None)
        ending = "it is not back" if back is None else f"its place was taken again in round {back.round:,}"
        told.append(f"{_sentence(event)}, and no sample; {ending}.")
    if before := lost[:-NEWEST]:
        told.append(f"Before, {_many(before)}.")
    return told


def _sentence(event: Happened) -> str:
    words = str(event)
    return f"{words[:1].upper()}{words[1:]} in round {event.round:,}; {seconds(event.seconds)} lost"


def _ran_by(run: Run, event: Happened) -> str:
    """Who ran the samples of the round."""
    who = np.flatnonzero(np.nan_to_num(run.loads[run.round.tolist().index(event.round)]) > 0).tolist()
    if not who:
        return ""
    names = f"{'worker' if len(who) == 1 else 'workers'} {listing(who)}"
    return f": all of the round were run by {names if len(who) <= NAMED else plural(len(who), 'worker')}"


def _many(lost: Sequence[Happened]) -> str:
    cost = {event.round: event.seconds for event in lost}  # two lost in one round cost it once
    worst = max(cost, key=lambda number: cost[number])
    were = "worker was lost or left" if len(lost) == 1 else "workers were lost or left"
    if len(cost) == 1:
        return f"{len(lost):,} {were} on the way: {seconds(cost[worst])} lost in round {worst:,}"
    return (
        f"{len(lost):,} {were} on the way: {seconds(sum(cost.values()))} lost in all, {seconds(cost[worst])} of it "
        f"in round {worst:,}"
    )
