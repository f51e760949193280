"""Workers that were lost, left or joined while a run continued: which worker, in which round, at what cost."""

from __future__ import annotations

import re
import statistics
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from paceline.runs.run import Run, named
from paceline.runs.words import listing, plural, seconds

MOST = 5  # events described one by one
NEWEST = 3  # events described on the live page
NAMED = 8  # most workers listed by number
RECENT = 20  # rounds, whose median is the usual duration
JOINED = "joined"
_SAID = re.compile(r"worker (\d{1,9}) (.+)", re.DOTALL)


class Happened(NamedTuple):
    """worker: -1 if the record names none. what: the sentence after the worker's name. seconds: the time lost."""

    round: int
    worker: int
    what: str
    seconds: float

    @property
    def joined(self) -> bool:
        """Whether the worker joined; otherwise it was lost or left."""
        return self.what == JOINED


class Costs:
    """Measures what events cost while a run is recorded: the seconds of their round beyond the usual ones."""

    def __init__(self) -> None:
        self._usual: deque[float] = deque(maxlen=RECENT)  # seconds of rounds without events

    def of(self, seconds: float, happened: Sequence[str]) -> list[dict[str, Any]]:
        """The events of the next round, as the record holds them. happened: a sentence on each."""
        usual = statistics.median(self._usual) if self._usual else seconds
        if not happened:
            self._usual.append(seconds)
        late = round(max(seconds - usual, 0.0), 4)
        return [{"what": words, "seconds_lost": late} for words in happened]


def events(run: Run) -> list[Happened]:
    """All events of the record, in its order."""
    found = []
    for number, of_round in zip(run.round.tolist(), run.extras.get("events") or (), strict=False):
        for event in of_round or ():
            if isinstance(event, dict) and isinstance(what := event.get("what"), str):
                cost = event.get("seconds_lost")
                lost = float(cost) if isinstance(cost, int | float) and np.isfinite(cost) else 0.0
                said = _SAID.fullmatch(what)
                worker, words = (int(said[1]), said[2]) if said else (-1, what)
                found.append(Happened(number, worker, words, max(lost, 0.0)))
    return found


def sentences(run: Run) -> list[str]:
    """A sentence for each lost worker (when, at what cost, who ran its samples), or one on all if they are many."""
    lost = [event for event in events(run) if not event.joined]
    if len(lost) <= MOST:
        return [f"{_sentence(event, run.names)}{_ran_by(run, event)}." for event in lost]
    return [f"{_many(lost)}; no sample was lost."]


def brief(run: Run) -> str:
    """One short sentence on all lost workers, for a comparison of runs; empty if none was lost."""
    lost = [event for event in events(run) if not event.joined]
    return f"{_many(lost)}." if lost else ""


def newest(found: Sequence[Happened], names: Mapping[int, str]) -> list[str]:
    """Sentences for the live page on the workers that were lost last, and whether they were replaced."""
    lost = [event for event in found if not event.joined]
    said = []
    for event in reversed(lost[-NEWEST:]):
        after = (each for each in found[found.index(event) :] if each.worker == event.worker and each.joined)
        back = next(after, None)
        ending = "it is not replaced yet" if back is None else f"it was replaced in round {back.round:,}"
        said.append(f"{_sentence(event, names)}; {ending}.")
    if before := lost[:-NEWEST]:
        said.append(f"Before that, {_many(before)}.")
    return said


def _sentence(event: Happened, names: Mapping[int, str]) -> str:
    who = f"Worker {named(event.worker, names)} " if event.worker >= 0 else ""
    words = who + event.what
    cost = seconds(event.seconds)
    return f"{words[:1].upper()}{words[1:]} in round {event.round:,}; this cost {cost} and no sample"


def _ran_by(run: Run, event: Happened) -> str:
    """A clause on the workers that ran the samples of the round."""
    who = np.flatnonzero(np.nan_to_num(run.loads[run.round.tolist().index(event.round)]) > 0).tolist()
    if not who:
        return ""
    each = f"{'worker' if len(who) == 1 else 'workers'} {listing([run.named(i) for i in who])}"
    return f": {each if len(who) <= NAMED else plural(len(who), 'worker')} ran all samples of the round"


def _many(lost: Sequence[Happened]) -> str:
    cost = {event.round: event.seconds for event in lost}  # counted once if two are lost in one round
    worst = max(cost, key=lambda number: cost[number])
    were = "worker was lost or left" if len(lost) == 1 else "workers were lost or left"
    if len(cost) == 1:
        return f"{len(lost):,} {were} during the run: {seconds(cost[worst])} lost in round {worst:,}"
    return (
        f"{len(lost):,} {were} during the run: {seconds(sum(cost.values()))} lost in all, {seconds(cost[worst])} of "
        f"it in round {worst:,}"
    )
