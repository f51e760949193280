"""Sentences about one run or several runs, the most important first."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from paceline.runs import events
from paceline.runs.run import Run, is_number
from paceline.runs.summary import (
    WORTHWHILE,
    balanced_seconds,
    changes,
    dropped,
    final_loss,
    last,
    median,
    piece_figures,
    seconds_per_sample,
    settled,
    slowness,
    straggler_share,
    summarize,
)
from paceline.runs.words import listing, number, percent, plural, seconds, times

OWN_STEPS = (
    "Each worker took its own optimizer steps, and a round is the time between two merges of their parameters: this "
    "model is not the one that a single process would have trained."
)
BETWEEN = 0.05  # portion of a run's time between its rounds from which a sentence reports it
SLOWER = 1.15  # slowness from which a worker is called slower than the others


def findings(run: Run) -> list[str]:
    """Sentences about one run, the most important first; each follows from the record."""
    if not len(run.round):
        return ["No round was recorded.", *run.notes]
    summary = summarize(run)
    found = [
        *([OWN_STEPS] if _local(run) else []),
        *speeds_in_words(run),
        *changes_in_words(run),
        *_stragglers(run),
        *_waste(run, summary),
        *_idle(run),
        *_loads(run),
        *_odd_rounds(run),
        *_between(run, summary),
        *_absent(run),
        *_played(run),
        *events.sentences(run),
        *_learning(run, summary),
        *_pieces(run),
        *_memory(run),
        *_dropped(run),
    ]
    parts = [part for part in run.config.get("resumed", []) if isinstance(part, dict)]
    found += [f"The run was resumed after {plural(part.get('round', 0), 'round')}." for part in parts]
    return found + run.notes


def _memory(run: Run) -> list[str]:
    rows = [row for row in run.extras.get("ran_out") or () if row and len(row) == run.workers]
    passes = np.sum(np.nan_to_num(np.array(rows, float)), axis=0) if rows else np.zeros(run.workers)
    return [
        f"Worker {run.named(worker)} ran out of memory {plural(int(many), 'time')}, and ran those samples again in "
        "halves."
        for worker, many in enumerate(passes.tolist())
        if many
    ]


def _dropped(run: Run) -> list[str]:
    lost = dropped(run).sum(axis=0)
    if not lost.any():
        return []
    whole = lost.sum() + float(run.batch.sum())
    each = [f"{int(many)} of worker {run.named(worker)}" for worker, many in enumerate(lost.tolist()) if many]
    return [
        f"{percent(lost.sum() / whole)} of the samples were dropped after the threshold, {listing(each)}; gradients "
        "are means over the samples that ran."
    ]


def _local(run: Run) -> bool:
    """Whether each worker took its own optimizer steps."""
    return run.config.get("loop") == "local"


def slow_workers(runs: Sequence[Run]) -> str:
    """A clause on the workers that are slower than the others in all runs, and by how much; empty if none is."""
    longest = max(runs, key=lambda run: len(run.round))
    ratios, named = slowness(longest), longest.named
    order = np.argsort(-np.nan_to_num(ratios), kind="stable")
    slow = [int(i) for i in order if ratios[i] >= SLOWER and all(_steadily(run, int(i)) for run in runs)]
    if len(slow) == 1:
        return f"worker {named(slow[0])} is {times(ratios[slow[0]])} slower"
    if 2 <= len(slow) <= 3:
        return f"workers {listing([named(i) for i in slow])} are {listing([times(ratios[i]) for i in slow])} slower"
    if slow:
        many = f"{len(slow)} of {len(ratios)} workers are at least {times(SLOWER)} slower than the median"
        return f"{many}; worker {named(slow[0])} is the slowest, {times(ratios[slow[0]])} slower"
    return ""


def _steadily(run: Run, worker: int) -> bool:
    """Whether the worker was slow both in the first half of the rounds and in the second."""
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
    """Sentences about several runs of the same task; the first is the headline.

    The runs are compared with the run with an equal split, or with the slowest run if no split is equal. Runs with
    different workers or tasks are not compared, since the difference need not come from the policy.
    """
    summaries = [summarize(run) for run in runs]
    names, unlike = labels(runs), differences(runs)
    if unlike:
        headline = f"These runs differ in {unlike}, so they do not show which policy is faster."
        return [headline, *(_line(*each, 0.0, "") for each in zip(names, runs, summaries, strict=True))]
    rates = [summary["samples_per_second"] or 0.0 for summary in summaries]
    equal = [i for i, run in enumerate(runs) if run.policy.split(":")[0] == "equal"]
    base = equal[0] if equal else int(np.argmin(rates))
    best = int(np.argmax(rates))
    clause = slow_workers(runs)
    opening = f"{clause[0].upper()}{clause[1:]}; " if clause else ""
    kind = "an equal split" if equal else runs[base].policy
    if summaries[base]["idle_share"] is not None:
        opening += f"{kind} wasted {percent(summaries[base]['idle_share'])} of the cluster's time; "
    gain = rates[best] / rates[base] if rates[base] > 0 else float("nan")
    level = [i for i, rate in enumerate(rates) if i != base and rate >= 0.99 * rates[best]]
    winners = " or ".join(names[i] for i in level)
    if best == base or not gain > 1.005:
        headline = f"{opening}no other policy was faster."
    elif all(_same_model(runs[base], runs[i], summaries[base], summaries[i]) for i in level):
        headline = f"{opening}with {winners}, the same model was trained {times(gain)} as fast."
    else:
        headline = f"{opening}with {winners}, samples were processed {times(gain)} as fast."
    lines = [_line(*each, rates[base], kind) for each in zip(names, runs, summaries, strict=True)]
    return [headline[0].upper() + headline[1:], *lines]


def _line(name: str, run: Run, summary: dict[str, Any], base: float, kind: str) -> str:
    extra = f" {lost}" if (lost := events.brief(run)) else ""
    rate = summary["samples_per_second"] or 0.0
    against = f" and {times(rate / base)} the speed of {kind}" if base > 0 and rate != base else ""
    return (
        f"{name}: {number(rate)} samples/s, which is {percent(summary['share_of_bound'])} of the workers' combined "
        f"speed{against}. The workers spent {percent(summary['idle_share'])} of their time waiting.{extra}"
    )


def _same_model(one: Run, other: Run, first: dict[str, Any], second: dict[str, Any]) -> bool:
    """Whether both runs had the same task and samples, and losses that agree within 1 %; False if workers took
    their own steps."""
    task = ("data", "model", "seed", "global_batch")
    alike = all(one.config.get(key) == other.config.get(key) for key in task)
    losses = first["train_loss"], second["train_loss"]
    if not alike or _local(one) or _local(other) or first["samples"] != second["samples"] or None in losses:
        return False
    return abs(losses[0] - losses[1]) <= 0.01 * max(abs(losses[0]), 0.01)


def speeds_in_words(run: Run) -> list[str]:
    """A sentence on the workers that are slower all the time, or on all workers if they are equally fast; or none."""
    ratios = slowness(run)
    known = ratios[~np.isnan(ratios)]
    if len(known) < 2:
        return []
    clause = slow_workers([run])
    if clause:
        others = "" if ";" in clause else " than the other" if len(known) == 2 else " than the others"
        return [f"{clause[0].upper()}{clause[1:]} per sample{others}."]
    most = max(float(known.max()), 1.0)
    if changes(run) or most >= SLOWER:  # no sentence holds for all rounds
        return []
    return [
        f"The workers are about equally fast: the slowest takes {times(most)} the time of the others per sample."
    ]


def _stragglers(run: Run) -> list[str]:
    compute = run.compute[~np.isnan(run.compute).all(axis=1)]
    if run.workers < 2 or not len(compute):
        return []
    share = straggler_share(run)
    who = int(share.argmax())
    when = "every round" if share[who] == 1 else f"{percent(share[who])} of the rounds"
    text = f"Worker {run.named(who)} was last in {when}."
    if share[who] < 0.5:
        text = f"No worker is consistently last: worker {run.named(who)} was last most often, in {when}."
    latest = np.nanmax(compute, axis=1)
    half = np.nanmedian(compute, axis=1)[latest > 0] / latest[latest > 0]
    if not len(half):
        return [text]
    part = percent(float(np.median(half)))
    return [f"{text} The median worker finished at {part} of the slowest worker's time."]


def _waste(run: Run, summary: dict[str, Any]) -> list[str]:
    share = summary["share_of_bound"]
    if share is None:
        return []
    text = (
        f"The workers spent {percent(summary['idle_share'])} of their time waiting. The run processed "
        f"{number(summary['samples_per_second'])} samples/s, which is {percent(share)} of the workers' combined "
        f"speed of {number(summary['bound_samples_per_second'])} samples/s."
    )
    would = balanced_seconds(run)
    if would is not None and would < WORTHWHILE * summary["seconds"]:
        real = seconds(summary["seconds"])
        return [
            f"{text} With loads by measured speed, it would have taken {seconds(would)} instead of {real}."
        ]
    return [text]


def _idle(run: Run) -> list[str]:
    """A sentence on a worker that waited far longer than the others, if there is one."""
    share = np.nansum(run.wait, axis=0) / max(float(run.seconds.sum()), 1e-300)
    who = int(share.argmax())
    if run.workers < 2 or share[who] < 0.3 or share[who] < 2 * np.median(np.delete(share, who)):
        return []
    return [
        f"Worker {run.named(who)} could have taken more samples: it waited {percent(share[who])} of the time."
    ]


def _loads(run: Run) -> list[str]:
    left_out = dropped(run)
    plan = replace(run, loads=run.loads + left_out, batch=run.batch + left_out.sum(axis=1))
    loads = plan.loads[plan.batch == plan.batch.max()]
    known = ~np.isnan(loads)
    if run.workers < 2 or not known.all():
        return []
    if (np.ptp(loads, axis=1) <= 1).all():
        return ["Every round was split equally."]
    if (loads == loads[0]).all():
        return [f"The split never changed: {_loads_text(loads[-1])}."]
    moved = sorted({change.round for change in changes(run)})
    first = settled(plan, 0, moved[0] if moved else None)
    found = []
    if first is not None:
        ending = "" if moved else f" at {_loads_text(loads[-1])}"
        stable = f"settled after {plural(first, 'round')}" if first else "were stable from the first round on"
        found.append(f"The loads {stable}{ending}.")
    elif len(run.round) >= 20:
        until = "a speed first changed" if moved else "the run ended"
        found.append(f"The loads never settled: the split was still changing when {until}.")
    ends = [*moved[1:], len(run.round)] if moved else []
    again = [settled(plan, start, end) for start, end in zip(moved, ends, strict=True)]
    known_again = [count for count in again if count is not None]
    if known_again:
        found.append(_adapted(known_again, len(again)))
    return found


def _adapted(counts: list[int], changed: int) -> str:
    """How soon the split settled after changes of speed. counts: rounds until then, for the changes after which it
    settled."""
    most = max(counts)
    which = "each change" if len(counts) == changed else f"{len(counts)} of {changed} changes"
    which = "the change" if changed == 1 else which
    if most == 0:
        return f"The split adapted to {which} of speed at once."
    middle = f" (median {np.median(counts):.3g})" if len(counts) > 1 else ""
    return f"The split adapted to {which} of speed within {plural(most, 'round')}{middle}."


def _loads_text(loads: np.ndarray) -> str:
    if len(loads) <= 8:
        return f"{listing([f'{load:.0f}' for load in loads])} samples"
    return f"{loads.min():.0f} to {loads.max():.0f} samples per worker"


def changes_in_words(run: Run) -> list[str]:
    """Sentences on the workers that became slower or faster and stayed so, and when."""
    found = changes(run)
    rounds = sorted({change.round for change in found})
    texts = []
    for at in rounds[:3]:
        became = [
            f"worker {run.named(change.worker)} was {times(max(change.ratio, 1 / change.ratio))} "
            f"{'slower' if change.ratio > 1 else 'faster'}"
            for change in found
            if change.round == at
        ]
        if len(became) > 4:
            became = [f"{len(became)} workers were slower or faster"]
        texts.append(f"From round {run.round[at]:,} on, {listing(became)} per sample than before.")
    if len(rounds) > 3:
        workers = sorted({change.worker for change in found})
        who = f"worker{'s' * (len(workers) > 1)} {listing([run.named(i) for i in workers])}"
        who = who if len(workers) <= 8 else f"{len(workers)} workers"
        texts.append(f"In all, lasting changes of speed began in {len(rounds)} rounds ({who}).")
    return texts


def _odd_rounds(run: Run) -> list[str]:
    middle = float(np.median(run.seconds))
    odd = np.flatnonzero(run.seconds > 3 * middle)
    if not len(odd) or len(odd) > 0.05 * len(run.seconds) + 1:
        return []
    worst = int(run.seconds.argmax())
    return [
        f"{plural(len(odd), 'round').capitalize()} took more than 3 times the median of {seconds(middle)}. "
        f"The longest was round {run.round[worst]:,} with {seconds(float(run.seconds[worst]))}."
    ]


def _between(run: Run, summary: dict[str, Any]) -> list[str]:
    elsewhere = float(run.time[-1]) - summary["seconds"]
    if elsewhere <= BETWEEN * run.time[-1]:
        return []
    return [
        f"The run spent another {seconds(elsewhere)} between its rounds, for example on evaluation and checkpoints; "
        "its time and its samples/s leave that out."
    ]


def _absent(run: Run) -> list[str]:
    missing = np.isnan(run.compute).sum(axis=0)
    who = [int(i) for i in np.flatnonzero(missing)]
    if not who or last(run).max() < 0:
        return []
    if len(who) == 1:
        first = int(np.isnan(run.compute[:, who[0]]).argmax())
        rounds = plural(int(missing[who[0]]), "round")
        return [
            f"Worker {run.named(who[0])} was absent from {rounds}, for the first time in round {run.round[first]:,}."
        ]
    most = f"worker {run.named(int(missing.argmax()))} most often, from {plural(int(missing.max()), 'round')}"
    return [f"{len(who)} workers were absent at times, {most}."]


PLAYED = {  # options of ``paceline train`` that make workers sleep, and what their numbers mean
    "slowdown": "so that the times of a sample have the ratio {}",
    "slowdown_ms": "{} ms a sample",
    "slowdown_trace": "as in {}",
}


def _played(run: Run) -> list[str]:
    """A sentence on workers that were slowed down on purpose."""
    for option, words in PLAYED.items():
        given = run.config.get(option)
        if isinstance(given, list) and given and all(map(is_number, given)):
            few = "/".join(map(number, given))
            given = few if len(given) <= 8 else f"{number(min(given))} to {number(max(given))}"
        if isinstance(given, str) and given:
            return [f"The workers slept, {words.format(given)}: their speeds were played."]
    return []


def _learning(run: Run, summary: dict[str, Any]) -> list[str]:
    parts = []
    known = run.loss[~np.isnan(run.loss)]
    if len(known) >= 2 and summary["train_loss"] is not None:
        verb = "fell" if (final_loss(run) or 0.0) < known[0] else "went"
        path = f"from {number(known[0])} in the first round to {number(final_loss(run))} in the last round"
        mean = f"its mean over the last epoch is {number(summary['train_loss'])}"
        parts.append(f"The training loss {verb} {path}, in {seconds(summary['seconds'])}; {mean}.")
    if summary.get("test_accuracy") is not None:
        parts.append(f"The test accuracy is {percent(summary['test_accuracy'], 1)}.")
    return parts


def _pieces(run: Run) -> list[str]:
    """Sentences on how often work moved within the rounds, and the two figures that decide whether it does."""
    found = piece_figures(run)
    if not found:
        return []
    what = "Every round ran as planned: no work was rebalanced while a round ran."
    if found["moved_rounds"]:
        what = (
            f"In {percent(found['moved_rounds'])} of the rounds, work was rebalanced while the round ran: "
            f"{percent(found['at_once'])} was assigned up front and the rest was claimed, in {found['pieces']:.1f} "
            "pieces per worker."
        )
    cost = f"An extra piece costs {seconds(found['piece_cost'])}"
    if (scatter := found["pace_scatter"]) is not None:
        cost += f", and the time per sample varies by {percent(scatter)} from round to round"
    return [what, f"{cost}."]


SAME = {
    "workers": "the number of workers",
    "global_batch": "the global batch",
    "data": "the data",
    "model": "the model",
    "loop": "the kind of steps between two exchanges",
    "every": "the interval between two merges",
}


def labels(runs: Sequence[Run]) -> list[str]:
    """A label for each run: its policy; plus the directory's name if runs share it, or the path if they still do."""
    policies = [run.policy for run in runs]
    named = [
        policy if policies.count(policy) == 1 else f"{policy} ({run.path.name})"
        for policy, run in zip(policies, runs, strict=True)
    ]
    pairs = list(zip(named, runs, strict=True))
    return [
        name
        if len({other.path for each, other in pairs if each == name}) == 1
        else f"{run.policy} ({run.path})"
        for name, run in pairs
    ]


def differences(runs: Sequence[Run]) -> str:
    """A clause on recorded differences between the runs other than the policy; "" if there are none."""
    loops = ({"workers": run.workers, "loop": "local steps" if _local(run) else "rounds"} for run in runs)
    facts = [run.config | each for run, each in zip(runs, loops, strict=True)]
    found = []
    for key, words in SAME.items():
        of_runs = (each.get(key) for each in facts)
        values = list(dict.fromkeys("not known" if each is None else str(each) for each in of_runs))
        if len(values) > 1:
            found.append(f"{words} ({listing(values)})")
    return listing(found) if found else ""
