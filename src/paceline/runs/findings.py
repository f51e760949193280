"""A run, or several, in words: what a person would want to be told first."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from paceline.runs import pieces
from paceline.runs.alike import differences, labels
from paceline.runs.analysis import (
    changes,
    last,
    median,
    seconds_per_sample,
    settled,
    slowness,
    straggler_share,
)
from paceline.runs.run import Run
from paceline.runs.summary import summarize
from paceline.runs.words import listing, number, percent, plural, seconds, times

SLOWER = 1.15  # workers closer than that to the others are called equally fast


def findings(run: Run) -> list[str]:
    """Sentences about one run, the weightiest first; every one is drawn from the record."""
    if not len(run.round):
        return ["No round was recorded.", *run.notes]
    summary = summarize(run)
    found = [
        *speeds_in_words(run),
        *changes_in_words(run),
        *_stragglers(run),
        *_waste(summary),
        *_idle(run),
        *_loads(run),
        *_odd_rounds(run),
        *_absent(run),
        *_learning(run, summary),
        *pieces.sentences(run),
    ]
    parts = [part for part in run.config.get("resumed", []) if isinstance(part, dict)]
    found += [f"The run was resumed after {plural(part.get('round', 0), 'round')}." for part in parts]
    return found + run.notes


def slow_workers(runs: Sequence[Run]) -> str:
    """Who is slower than the others all the time and how much, as a clause; empty when nobody is."""
    ratios = slowness(max(runs, key=lambda run: len(run.round)))
    order = np.argsort(-np.nan_to_num(ratios), kind="stable")
    slow = [int(i) for i in order if ratios[i] >= SLOWER and all(_steadily(run, int(i)) for run in runs)]
    if len(slow) == 1:
        return f"worker {slow[0]} is {times(ratios[slow[0]])} slower"
    if 2 <= len(slow) <= 3:
        return f"workers {listing(slow)} are {listing([times(ratios[i]) for i in slow])} slower"
    if slow:
        many = f"{len(slow)} of {len(ratios)} workers are at least {times(SLOWER)} slower than the median"
        return f"{many}, worker {slow[0]} most of all: {times(ratios[slow[0]])}"
    return ""


def _steadily(run: Run, worker: int) -> bool:
    """True when the worker was slow in the first half of the rounds and in the second."""
    middle = len(run.round) // 2
    own = seconds_per_sample(run)
    if worker >= own.shape[1]:
        return False
    with np.errstate(invalid="ignore"):
        first, second = (
            median(half)[worker] >= SLOWER * median(median(half)[:, None])[0]
            for half in (own[:middle], own[middle:])
        )
    return middle == 0 or bool(first and second)


def compare(runs: Sequence[Run]) -> list[str]:
    """Sentences about several runs of one thing; the first is the headline.

    The yardstick is the run with an equal split, the slowest one where there is none. Runs of other workers, or of
    another task, are told one by one: what makes one of these faster need not be its policy.
    """
    summaries = [summarize(run) for run in runs]
    names, unlike = labels(runs), differences(runs)
    if unlike:
        headline = f"These runs differ in {unlike}: which policy is the faster cannot be told from them."
        return [headline, *(_line(name, s, 0.0, "") for name, s in zip(names, summaries, strict=True))]
    rates = [summary["samples_per_second"] or 0.0 for summary in summaries]
    equal = [i for i, run in enumerate(runs) if run.policy.split(":")[0] == "equal"]
    base = equal[0] if equal else int(np.argmin(rates))
    best = int(np.argmax(rates))
    clause = slow_workers(runs)
    opening = f"{clause[0].upper()}{clause[1:]}; " if clause else ""
    kind = "an equal split" if equal else runs[base].policy
    if summaries[base]["idle_share"] is not None:
        opening += f"{kind} wasted {percent(summaries[base]['idle_share'])} of the cluster; "
    gain = rates[best] / rates[base] if rates[base] > 0 else float("nan")
    level = [i for i, rate in enumerate(rates) if i != base and rate >= 0.99 * rates[best]]
    winners = " or ".join(names[i] for i in level)
    if best == base or not gain > 1.005:
        headline = f"{opening}no other policy was faster."
    elif all(_same_model(runs[base], runs[i], summaries[base], summaries[i]) for i in level):
        headline = f"{opening}balanced by {winners}, the same model came out {times(gain)} sooner."
    else:
        headline = f"{opening}balanced by {winners}, samples went through {times(gain)} as fast."
    lines = [_line(name, s, rates[base], kind) for name, s in zip(names, summaries, strict=True)]
    return [headline[0].upper() + headline[1:], *lines]


def _line(name: str, summary: dict[str, Any], base: float, kind: str) -> str:
    rate = summary["samples_per_second"] or 0.0
    against = f", {times(rate / base)} {kind}" if base > 0 and rate != base else ""
    return (
        f"{name}: {number(rate)} samples/s, {percent(summary['share_of_bound'])} of what its "
        f"workers could do together{against}; {percent(summary['idle_share'])} of their time was waiting."
    )


def _same_model(one: Run, other: Run, first: dict[str, Any], second: dict[str, Any]) -> bool:
    """The same task and samples, and a loss that agrees to 1 %."""
    alike = all(
        one.config.get(key) == other.config.get(key) for key in ("data", "model", "seed", "global_batch")
    )
    losses = first["train_loss"], second["train_loss"]
    if not alike or first["samples"] != second["samples"] or None in losses:
        return False
    return abs(losses[0] - losses[1]) <= 0.01 * max(abs(losses[0]), 0.01)


def speeds_in_words(run: Run) -> list[str]:
    """Which workers are slower than the others all the time; where nobody is and no speed changed, that."""
    ratios = slowness(run)
    known = ratios[~np.isnan(ratios)]
    if len(known) < 2:
        return []
    clause = slow_workers([run])
    if clause:
        others = "" if ":" in clause else " than the other" if len(known) == 2 else " than the others"
        return [f"{clause[0].upper()}{clause[1:]} per sample{others}."]
    if changes(run):
        return []
    most = times(max(float(known.max()), 1.0))
    return [f"The workers are about equally fast: per sample the slowest takes {most} the others' time."]


def _stragglers(run: Run) -> list[str]:
    compute = run.compute[~np.isnan(run.compute).all(axis=1)]
    if run.workers < 2 or not len(compute):
        return []
    share = straggler_share(run)
    who = int(share.argmax())
    when = "every round" if share[who] == 1 else f"{percent(share[who])} of the rounds"
    text = f"Worker {who} was last in {when}"
    if share[who] < 0.5:
        text = f"No worker was last in most rounds, worker {who} most often, in {when}"
    latest = np.nanmax(compute, axis=1)
    half = np.nanmedian(compute, axis=1)[latest > 0] / latest[latest > 0]
    if not len(half):
        return [f"{text}."]
    return [
        f"{text}; half of the workers were done in {percent(float(np.median(half)))} of the last one's time."
    ]


def _waste(summary: dict[str, Any]) -> list[str]:
    share = summary["share_of_bound"]
    if share is None:
        return []
    said = (
        f"{percent(summary['idle_share'])} of the workers' time went into waiting. The run made "
        f"{number(summary['samples_per_second'])} samples/s, {percent(share)} of the "
        f"{number(summary['bound_samples_per_second'])} that its workers could make together"
    )
    if share < 0.9:
        ideal, real = seconds(summary["seconds"] * share), seconds(summary["seconds"])
        return [f"{said}: split by their speeds, it would have taken {ideal} instead of {real}."]
    return [said + "."]


def _idle(run: Run) -> list[str]:
    """A worker that has far less to do than the others."""
    share = np.nansum(run.wait, axis=0) / max(float(run.seconds.sum()), 1e-300)
    who = int(share.argmax())
    if run.workers < 2 or share[who] < 0.3 or share[who] < 2 * np.median(np.delete(share, who)):
        return []
    return [f"Worker {who} could have taken more: it waited {percent(share[who])} of the time."]


def _loads(run: Run) -> list[str]:
    full = np.flatnonzero(run.batch == run.batch.max())
    loads = run.loads[full]
    known = ~np.isnan(loads)
    if run.workers < 2 or not known.all():
        return []
    if (np.ptp(loads, axis=1) <= 1).all():
        return ["Every round was split equally."]
    if (loads == loads[0]).all():
        return [f"The split never changed: {_loads_text(loads[-1])}."]
    moved = sorted({change.round for change in changes(run)})
    first = settled(run, 0, moved[0] if moved else None)
    found = []
    if first is not None:
        when = f"after {plural(first, 'round')}" if first else "from the first round on"
        ending = "" if moved else f" at {_loads_text(loads[-1])}"
        found.append(f"The loads settled {when}{ending}.")
    elif len(run.round) >= 20:
        until = "a speed first changed" if moved else "the run ended"
        found.append(f"The loads never settled: the split was still moving when {until}.")
    ends = [*moved[1:], len(run.round)] if moved else []
    again = [settled(run, start, end) for start, end in zip(moved, ends, strict=True)]
    known_again = [count for count in again if count is not None]
    if known_again:
        found.append(
            f"After a change of speed they settled again in {plural(int(np.median(known_again)), 'round')}"
            f"{' (median)' if len(known_again) > 1 else ''}."
        )
    return found


def _loads_text(loads: np.ndarray) -> str:
    if len(loads) <= 8:
        return f"{listing([f'{load:.0f}' for load in loads])} samples"
    return f"{loads.min():.0f} to {loads.max():.0f} samples a worker"


def changes_in_words(run: Run) -> list[str]:
    """Which workers became lastingly slower or faster, and when."""
    found = changes(run)
    rounds = sorted({change.round for change in found})
    texts = []
    for at in rounds[:3]:
        became = [
            f"worker {change.worker} became {times(max(change.ratio, 1 / change.ratio))} "
            f"{'slower' if change.ratio > 1 else 'faster'}"
            for change in found
            if change.round == at
        ]
        if len(became) > 4:
            became = [f"{len(became)} workers changed their speed"]
        texts.append(f"In round {run.round[at]:,} {listing(became)}, per sample and lastingly.")
    if len(rounds) > 3:
        workers = sorted({change.worker for change in found})
        who = f"worker{'s' * (len(workers) > 1)} {listing(workers)}"
        who = who if len(workers) <= 8 else f"{len(workers)} workers"
        texts.append(f"Speeds changed lastingly in {len(rounds)} rounds in all ({who}).")
    return texts


def _odd_rounds(run: Run) -> list[str]:
    middle = float(np.median(run.seconds))
    odd = np.flatnonzero(run.seconds > 3 * middle)
    if not len(odd) or len(odd) > 0.05 * len(run.seconds) + 1:
        return []
    worst = int(run.seconds.argmax())
    return [
        f"{plural(len(odd), 'round').capitalize()} took more than 3 times the median of {seconds(middle)}; "
        f"the longest, round {run.round[worst]:,}, {seconds(float(run.seconds[worst]))}."
    ]


def _absent(run: Run) -> list[str]:
    missing = np.isnan(run.compute).sum(axis=0)
    who = [int(i) for i in np.flatnonzero(missing)]
    if not who or last(run).max() < 0:
        return []
    if len(who) == 1:
        first = int(np.isnan(run.compute[:, who[0]]).argmax())
        rounds = plural(int(missing[who[0]]), "round")
        return [f"Worker {who[0]} was absent from {rounds}, first from round {run.round[first]:,}."]
    most = f"worker {int(missing.argmax())} most: from {plural(int(missing.max()), 'round')}"
    return [f"{len(who)} workers were absent at times, {most}."]


def _learning(run: Run, summary: dict[str, Any]) -> list[str]:
    parts = []
    known = run.loss[~np.isnan(run.loss)]
    if len(known) >= 2 and summary["train_loss"] is not None:
        verb = "fell" if summary["train_loss"] < known[0] else "went"
        path = f"from {number(known[0])} to {number(summary['train_loss'])}"
        parts.append(f"the training loss {verb} {path} in {seconds(float(run.time[-1]))}")
    if summary.get("test_accuracy") is not None:
        parts.append(f"the test accuracy is {percent(summary['test_accuracy'], 1)}")
    text = "; ".join(parts)
    return [f"{text[0].upper()}{text[1:]}."] if text else []
