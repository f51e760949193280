"""What is happening in a run now: who is the straggler, since when, and what balancing saves."""

from __future__ import annotations

import warnings
from typing import Any, NamedTuple

import numpy as np

from paceline.errors import PacelineError
from paceline.runs.columns import Columns
from paceline.runs.findings import changes_in_words, speeds_in_words
from paceline.simulate.whatif import of_run

LATELY = 8  # rounds over which the workers' bars are averaged
JUDGED = 64  # rounds by which rates and savings are judged
CHANGED = 2000  # rounds in which changes of speed are looked for
MAJORITY = 0.5  # of the last LATELY rounds, for a worker to be the straggler


class Straggler(NamedTuple):
    """``worker`` has been late in most rounds since the one at place ``since``; ``cost``: seconds that the
    others together waited for it in these."""

    worker: int
    since: int
    cost: float


class Saving(NamedTuple):
    """Mean seconds of a recent round as it was, and as it would have been under ``other``."""

    other: str
    real: float
    would: float


class Server(NamedTuple):
    """Gradients that an update waited for, workers that were there (means), and updates that the oldest gradient
    used was behind."""

    quorum: float
    present: float
    stalest: int


def straggler(columns: Columns) -> Straggler | None:
    """Who the others wait for now; None if it is nobody, or another one every time."""
    late = columns["late"]
    if not len(late):
        return None
    recent = late[-LATELY:]
    who = np.bincount(recent[recent >= 0].astype(int), minlength=1)
    worker = int(who.argmax())
    if who[worker] <= MAJORITY * len(recent):
        return None
    hits = np.concatenate(([0.0], np.cumsum(late == worker)))
    width = min(LATELY, len(late))
    share = (hits[width:] - hits[:-width]) / width  # [t]: of the rounds t to t + width - 1
    seldom = np.flatnonzero(share <= MAJORITY)
    start = int(seldom[-1]) + 1 if len(seldom) else 0
    since = start + int(np.argmax(late[start:] == worker))
    waited = columns.sums(since, len(columns))[3]
    return Straggler(worker, since, float(waited.sum() - waited[worker]))


def saving(columns: Columns) -> Saving | None:
    """What balancing saves now, or would save where the split is equal; None if the record cannot tell.

    The recent rounds' own paces are played under the other policy (``paceline.simulate.whatif``). A parameter
    server that does not wait for everybody has rounds that do not compare.
    """
    lately = server(columns) if len(columns) else None
    late = lately is not None and (lately.quorum < lately.present or lately.stalest)
    if columns.workers < 2 or not len(columns) or late:
        return None
    recent = columns.part(max(len(columns) - JUDGED, 0), len(columns))
    other = "level" if recent.policy.split(":")[0] == "equal" or _even(recent.loads) else "equal"
    try:
        with warnings.catch_warnings():  # rounds in which nobody was there
            warnings.simplefilter("ignore", RuntimeWarning)
            answer = of_run(recent, [other])
    except (PacelineError, ValueError):
        return None
    half = slice(len(recent.seconds) // 2, None)
    seconds, played = recent.seconds[half], answer.policies[other].rounds[half]  # which may leave some out
    if not len(seconds) or not len(played):
        return None
    real, would = float(seconds.mean()), float(played.mean())
    return Saving(other, real, would) if real > 0 and would > 0 else None


def speeds(columns: Columns) -> list[str]:
    """Who is slow for each sample lately, and whose speed changed last: two sentences at most."""
    if not len(columns):
        return []
    recent = columns.part(max(len(columns) - CHANGED, 0), len(columns))
    return [*speeds_in_words(recent), *changes_in_words(recent)[-1:]]


def rounds_in_all(columns: Columns, config: dict[str, Any]) -> int | None:
    """How many rounds the run is to have: as it says, or as many epochs as it says, each like the first one that is
    over; None if that is not known."""
    steps, epochs = config.get("steps"), config.get("epochs")
    if isinstance(steps, int):
        return steps or None
    epoch = columns["epoch"]
    if not isinstance(epochs, int) or not len(epoch) or epoch[-1] == epoch[0]:
        return None
    each = int((epoch == epoch[0]).sum())
    return each * epochs if columns["round"][0] == 0 else None


def seconds_left(columns: Columns, total: int | None) -> float | None:
    """How long the rounds that are missing will take at the pace of the recent ones; None if that is not known."""
    time, rounds = columns["time"][-JUDGED - 1 :], columns["round"][-JUDGED - 1 :]
    missing = 0 if total is None or not len(rounds) else total - 1 - int(rounds[-1])
    if missing <= 0 or len(time) < 2:
        return None
    return missing * float(time[-1] - time[0]) / float(rounds[-1] - rounds[0])


def server(columns: Columns) -> Server | None:
    """What the recent updates of a parameter server waited for; None if there is none, or nothing is known."""
    recent = columns.window(max(len(columns) - JUDGED, 0)).server
    if not recent or any(np.isnan(recent[name]).all() for name in ("quorum", "present")):
        return None
    return Server(
        float(np.nanmean(recent["quorum"])),
        float(np.nanmean(recent["present"])),
        int(np.nan_to_num(recent["stalest"]).max()),
    )


def _even(loads: np.ndarray) -> bool:
    known = np.where(np.isnan(loads).any(axis=1, keepdims=True), 0.0, loads)
    return bool((np.ptp(known, axis=1) <= 1).all())
