"""The content of the live page besides its charts: sentences on the present (the straggler, since when, and what
balancing saves), the state of the run, figures at a glance, and one entry per worker.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from paceline.errors import PacelineError
from paceline.live.tail import Tail
from paceline.runs import events
from paceline.runs.charts import ROWS
from paceline.runs.columns import BANDS, Columns
from paceline.runs.findings import changes_in_words, speeds_in_words
from paceline.runs.report import Card, about_config, cards
from paceline.runs.run import named, waiting_share
from paceline.runs.words import about, listing, number, percent, plural, seconds
from paceline.simulate.whatif import of_run

LATELY = 8  # rounds over which the workers' bars are averaged
JUDGED = 64  # recent rounds from which rates and savings are estimated
CHANGED = 2000  # recent rounds that are searched for changes of speed
MAJORITY = 0.5  # portion of the last LATELY rounds that makes a worker the straggler


class Straggler(NamedTuple):
    """``worker`` has been late in most rounds since the one at index ``since``; ``cost``: seconds that the
    others together waited in these rounds."""

    worker: int
    since: int
    cost: float


class Saving(NamedTuple):
    """Mean seconds of a recent round: ``real`` as measured, ``would`` as estimated under the policy ``other``."""

    other: str
    real: float
    would: float


class ServerFigures(NamedTuple):
    """Mean number of gradients that an update waited for, mean number of workers present, and the staleness (in
    updates) of the oldest gradient used."""

    quorum: float
    present: float
    stalest: int


def straggler(columns: Columns) -> Straggler | None:
    """The worker that the others wait for now; None if no worker is late in most rounds."""
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
    share = (hits[width:] - hits[:-width]) / width  # [t]: of rounds t to t + width - 1
    seldom = np.flatnonzero(share <= MAJORITY)
    start = int(seldom[-1]) + 1 if len(seldom) else 0
    since = start + int(np.argmax(late[start:] == worker))
    waited = columns.sums(since, len(columns))[3]
    return Straggler(worker, since, float(waited.sum() - waited[worker]))


def saving(columns: Columns) -> Saving | None:
    """What balancing saves now, or would save if the split is equal; None if the record does not show it.

    The paces of the recent rounds are replayed under the other policy (``paceline.simulate.whatif``). Rounds of a
    parameter server that does not wait for all workers cannot be compared.
    """
    lately = server(columns) if len(columns) else None
    late = lately is not None and (lately.quorum < lately.present or lately.stalest)
    if columns.workers < 2 or not len(columns) or late:
        return None
    recent = columns.part(max(len(columns) - JUDGED, 0), len(columns))
    other = "level" if recent.policy.split(":")[0] == "equal" or _even(recent.loads) else "equal"
    try:
        with warnings.catch_warnings():  # rounds without any worker
            warnings.simplefilter("ignore", RuntimeWarning)
            answer = of_run(recent, [other])
    except (PacelineError, ValueError):
        return None
    half = slice(len(recent.seconds) // 2, None)
    seconds, played = recent.seconds[half], answer.policies[other].rounds[half]  # may have fewer rounds
    if not len(seconds) or not len(played):
        return None
    real, would = float(seconds.mean()), float(played.mean())
    return Saving(other, real, would) if real > 0 and would > 0 else None


def speeds(columns: Columns) -> list[str]:
    """At most two sentences: which workers are slow per sample lately, and the latest change of speed."""
    if not len(columns):
        return []
    recent = columns.part(max(len(columns) - CHANGED, 0), len(columns))
    return [*speeds_in_words(recent), *changes_in_words(recent)[-1:]]


def rounds_in_all(columns: Columns, config: dict[str, Any]) -> int | None:
    """Planned number of rounds: the configuration's ``steps``, or ``epochs`` times the rounds of the first epoch
    if that is over; None if unknown."""
    steps, epochs = config.get("steps"), config.get("epochs")
    if isinstance(steps, int):
        return steps or None
    epoch = columns["epoch"]
    if not isinstance(epochs, int) or not len(epoch) or epoch[-1] == epoch[0]:
        return None
    each = int((epoch == epoch[0]).sum())
    return each * epochs if columns["round"][0] == 0 else None


def seconds_left(columns: Columns, total: int | None) -> float | None:
    """Seconds that the remaining rounds will take at the pace of the recent ones; None if unknown."""
    time, rounds = columns["time"][-JUDGED - 1 :], columns["round"][-JUDGED - 1 :]
    missing = 0 if total is None or not len(rounds) else total - 1 - int(rounds[-1])
    if missing <= 0 or len(time) < 2:
        return None
    return missing * float(time[-1] - time[0]) / float(rounds[-1] - rounds[0])


def server(columns: Columns) -> ServerFigures | None:
    """What the recent updates of a parameter server waited for; None without a server, or if nothing is known."""
    recent = columns.window(max(len(columns) - JUDGED, 0)).server
    if not recent or any(np.isnan(recent[name]).all() for name in ("quorum", "present")):
        return None
    return ServerFigures(
        float(np.nanmean(recent["quorum"])),
        float(np.nanmean(recent["present"])),
        int(np.nan_to_num(recent["stalest"]).max()),
    )


def _even(loads: np.ndarray) -> bool:
    known = np.where(np.isnan(loads).any(axis=1, keepdims=True), 0.0, loads)
    return bool((np.ptp(known, axis=1) <= 1).all())


QUIET = 5.0  # seconds without a round after which a run may be called stale
EXPECTED = 8.0  # and multiples of the longest recent round; both must have passed


def state(tail: Tail) -> tuple[str, str]:
    """What the run is doing: a word for the page and a sentence for people.

    The word is one of waiting (for the first round), reading (a long record, for the first time), running,
    finished, stale (no round for longer than expected), damaged (the record), gone (the directory).
    """
    columns = tail.columns
    if tail.gone and not tail.config:
        return "waiting", f"Waiting for a run to start in {tail.run_dir}."
    if tail.gone:
        return "gone", tail.gone
    if tail.damaged:
        return "damaged", tail.damaged
    if tail.more:
        return "reading", "Reading the record."
    if tail.summary:
        return "finished", f"Finished after {plural(len(columns), 'round')}."
    since = time.strftime("%H:%M:%S on %d %B %Y", time.localtime(tail.touched))
    if not len(columns):
        return "waiting", f"Waiting for the first round; the run was started at {since}."
    recent = columns["seconds"][-32:]
    if tail.silent > max(QUIET, EXPECTED * float(recent.max())):
        usual = seconds(float(np.median(recent)))
        return (
            "stale",
            f"No new round since {since}; before that, a round took {usual}. The run may have stopped.",
        )
    return "running", "Running."


def panel(tail: Tail, saving: Saving | None, speeds: Sequence[str] = ()) -> dict[str, Any]:
    """The whole content but the charts; texts are words for people, widths are portions from 0 to 1.

    saving, speeds: the latest estimates of what balancing saves, and of which workers are or became slow.
    The entry ``workers`` has for each row: the worker's number, whether it is the straggler or gone, the mark beside
    its name, its load and times in words, and the widths of its load, overhead, computing and waiting.
    """
    columns = tail.columns
    word, sentence = state(tail)
    policy, count = tail.config.get("policy", "a run"), max(columns.workers, tail.config.get("workers") or 0)
    last = straggler(columns)
    title = f"{policy} on {plural(count, 'worker')}" if tail.config else "No run yet"
    content: dict[str, Any] = {"state": word, "says": sentence, "title": title, "rounds": len(columns)}
    content |= {"about": about_config(tail.config), "span": [], "cards": "", "sentences": [], "workers": []}
    if not len(columns):
        return content
    rounds = columns["round"]
    content["span"] = [int(rounds[0]), int(rounds[-1]) + 1]
    content["cards"] = cards(_cards(columns, tail.config, word == "running"))
    lost = events.newest(columns.happened, columns.names)
    # Speeds come first: "no worker is last" reads well only after "worker 3 is slow", when a split makes up for it.
    content["sentences"] = [*lost, *speeds, *_sentences(columns, tail.config, last, saving)]
    content["workers"] = _workers_now(columns, last)
    return content


def _cards(columns: Columns, config: dict[str, Any], running: bool) -> list[Card]:
    """Figures at a glance, without those in the sentences. running: whether more rounds are expected."""
    recent = slice(-JUDGED, None)
    length, ideal = columns["seconds"][recent], columns["ideal"][recent]
    known = ~np.isnan(ideal)
    whole = float(length.sum())
    reach = float(ideal[known].sum() / length[known].sum()) if length[known].sum() > 0 else None
    judged = columns.part(max(len(columns) - JUDGED, 0), len(columns))
    idle = waiting_share(judged.seconds, judged.compute)
    total = rounds_in_all(columns, config)
    left = seconds_left(columns, total) if running else None
    goes_on = "" if left is None else f", about {about(left)} left"
    done, of = (min(len(columns) / total, 1.0), f"of {total:,} rounds") if total else (None, "rounds")
    rate = number(float(columns["batch"][recent].sum()) / whole if whole > 0 else None)
    entries: list[Card] = [
        (f"{len(columns):,}", of, f"in {seconds(float(columns['seconds'].sum()))}{goes_on}", done),
        (rate, "", f"samples/s lately, {seconds(float(length.mean()))} per round", None),
        (percent(reach), "", "of the workers' combined speed lately", reach),
        (percent(idle), "", "of the workers' time is spent waiting lately", idle),
    ]
    loss = columns["loss"][~np.isnan(columns["loss"][:])][-1:]
    if len(loss):
        entries.append((number(float(loss[0])), "loss", "in the newest round", None))
    return entries


def _sentences(
    columns: Columns, config: dict[str, Any], last: Straggler | None, saving: Saving | None
) -> list[str]:
    found = []
    if last is not None:
        since = columns["round"][last.since]
        ago = seconds(float(columns["time"][-1] - columns["time"][last.since]))
        found.append(
            f"Worker {named(last.worker, columns.names)} has been the straggler since round {since:,.0f}, for {ago}; "
            f"the others together waited {seconds(last.cost)} in that time."
        )
    elif columns.workers > 1:
        found.append("No worker is consistently last now.")
    if saving is not None:
        found.append(saving_sentence(saving))
    if (lately := server(columns)) is not None:
        found.append(_server(columns, config, lately))
    return found


def saving_sentence(saving: Saving) -> str:
    """A sentence on what balancing saves, or would save."""
    real, would = seconds(saving.real), seconds(saving.would)
    if saving.other == "equal":
        if saving.would > 1.02 * saving.real:
            rest = seconds(saving.would - saving.real)
            return (
                f"Balancing saves {rest} per round now: an equal split would take {would} instead of {real}."
            )
        return (
            f"Balancing saves almost nothing now: an equal split would take {would}, this one takes {real}."
        )
    if saving.real > 1.02 * saving.would:
        rest = seconds(saving.real - saving.would)
        return f"Balancing would save {rest} per round: {saving.other} would take {would} instead of {real}."
    return f"Balancing would save almost nothing: {saving.other} would take {would}, an equal split takes {real}."


def _server(columns: Columns, config: dict[str, Any], server: ServerFigures) -> str:
    gate = " and ".join(
        f"{what} {config[key]}"
        for key, what in (("sync", "gate"), ("backup", "backup policy"))
        if config.get(key)
    )
    age = f"; its gradients were up to {plural(server.stalest, 'update')} old" if server.stalest else ""
    lost = listing([f"{count:,} {what}" for what, count in sorted(columns.dropped.items())])
    unused = f"; gradients not used in the whole run: {lost}" if columns.dropped else ""
    return (
        f"An update waits for {number(server.quorum)} of {number(server.present)} workers lately"
        f"{f' ({gate})' if gate else ''}{age}{unused}."
    )


def _workers_now(columns: Columns, last: Straggler | None) -> list[dict[str, Any]]:
    start, end = max(len(columns) - LATELY, 0), len(columns)
    totals = columns.sums(start, end)
    there = np.where(totals[4] > 0, totals[4], np.nan)
    loads, compute, overhead, wait = np.maximum(totals[:4], 0.0) / there
    overhead = np.minimum(overhead, compute)
    most = float(np.nanmax(loads)) if not np.isnan(loads).all() else 0.0
    whole = float(np.nanmax(compute + wait)) if not np.isnan(compute).all() else 0.0
    rows, standing = [], {event.worker: event for event in columns.happened}  # what happened last
    for i in columns.rows(ROWS):
        event = standing.get(i)
        gone = event is not None and not event.joined
        slow = last is not None and last.worker == i and not gone
        marks = ["▲ straggler" if slow else "", _mark(event, columns) if event is not None else ""]
        row: dict[str, Any] = {
            "name": columns.label(i),
            "colour": f"c{i % BANDS}",
            "last": slow,
            "gone": gone,
            "mark": ", ".join(filter(None, marks)),
        }
        if gone or np.isnan(there[i]):
            row |= {"load": "absent", "time": event.what if gone and event else "", "widths": [0, 0, 0, 0]}
        else:
            row |= {"load": f"{number(loads[i])} samples"}
            row |= {"time": f"computes {seconds(compute[i])}, waits {seconds(wait[i])}"}
            parts = (overhead[i], compute[i] - overhead[i], wait[i])
            widths = (loads[i] / (most or 1.0), *(part / (whole or 1.0) for part in parts))
            row |= {"widths": [round(float(width), 4) for width in widths]}
        rows.append(row)
    return rows


def _mark(event: events.Happened, columns: Columns) -> str:
    if not event.joined:
        return f"✕ since round {event.round:,}"
    return f"+ joined in round {event.round:,}" if columns["round"][-1] - event.round < JUDGED else ""
