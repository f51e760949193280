"""What a watched run shows: who is slow and since when, at what, what that costs, and what would help."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from paceline.rounds import Array
from paceline.runs import Run
from paceline.runs.analysis import Change, changes, median, straggler_share, typical
from paceline.runs.waiting import waiting_share
from paceline.runs.words import listing, percent, plural, seconds, times
from paceline.simulate.whatif import Answer, of_run

POLICIES = ("level", "auto", "dolbie", "lbbsp-gpu", "wlbs")
SLOWER = 1.15  # ranks closer than that to the others are called equally fast
LITTLE = 0.03  # of the ranks' time lost in waiting: not worth a change
NEAR = 1.02  # times the quickest policy's seconds: no reason to prefer that one
MUCH_EXCHANGE = 0.25  # of a step


class Spent(NamedTuple):
    """Where a typical step goes, in seconds; arrays of one number a rank, shape (n,).

    step: of the whole step. loading, computing: own. waiting: for ranks that are not there yet. exchanging: the
    all-reduce after the last has come. slowness: seconds a sample over the fastest rank's.
    """

    step: float
    loading: Array
    computing: Array
    waiting: Array
    exchanging: float
    slowness: Array


class Diagnosis(NamedTuple):
    """sentences: the weightiest first. answer: what each policy would give. lines: to put into the script."""

    run: Run
    sentences: list[str]
    spent: Spent
    answer: Answer
    lines: list[str]


def diagnose(run: Run, policies: Sequence[str] = POLICIES) -> Diagnosis:
    """From the record of a watched run (see ``probe``); PacelineError where it has no rounds."""
    answer = of_run(run, policies)
    take = _take(answer)
    spent = _spent(run)
    sentences = [_who(run, spent), *_at_what(spent), _cost(run, spent, answer), *_exchange(spent)]
    worth = bool(take) and _idle(run) >= LITTLE
    if not worth:
        sentences.append("There is next to nothing to gain from balancing: leave the script as it is.")
    return Diagnosis(run, sentences, spent, answer, _lines(run, take) if worth else [])


def to_json(found: Diagnosis) -> dict[str, Any]:
    """For programs: the sentences, each rank's seconds, every policy's gain, the lines."""
    spent = found.spent
    return {
        "sentences": found.sentences,
        "steps": len(found.run.round),
        "step_seconds": spent.step,
        "exchange_seconds": spent.exchanging,
        "ranks": [
            {
                "samples": float(np.median(found.run.loads[:, rank])),
                "loading_seconds": float(spent.loading[rank]),
                "computing_seconds": float(spent.computing[rank]),
                "waiting_seconds": float(spent.waiting[rank]),
                "slowness": float(spent.slowness[rank]),
            }
            for rank in range(found.run.workers)
        ],
        "waiting_share": _idle(found.run),
        "policies": {
            name: {"seconds": would.seconds, "speedup": found.answer.seconds / would.seconds}
            for name, would in found.answer.policies.items()
        },
        "take": _take(found.answer) or None,
        "lines": found.lines,
    }


def _spent(run: Run) -> Spent:
    loading, reducing = (
        np.array([row if row is not None else [np.nan] * run.workers for row in run.extras[name]], float)
        for name in ("loading", "reducing")
    )
    exchanging = np.nanmin(reducing, axis=1)  # the last to come waits for nobody
    own = typical(run)
    return Spent(
        float(np.median(run.seconds)),
        median(loading),
        median(run.compute - loading),
        median(reducing - exchanging[:, None]),
        float(np.median(exchanging)),
        own / np.nanmin(own),
    )


def _take(answer: Answer) -> str:
    """The quickest policy, but level where that is next to it; "" where none gains."""
    level = answer.policies.get("level")
    best = answer.best
    near = level is not None and best and level.seconds <= NEAR * answer.policies[best].seconds
    return "level" if near else best


def _idle(run: Run) -> float:
    """Portion of the ranks' time that went into waiting for the slowest of each step."""
    return waiting_share(run.seconds, run.compute) or 0.0


def _who(run: Run, spent: Spent) -> str:
    moved = changes(run)
    if not moved and (slow := _slow(run)):
        ranks, ratios = slow[:3], listing([times(spent.slowness[i]) for i in slow[:3]])
        who = f"Rank {ranks[0]} takes" if len(ranks) == 1 else f"Ranks {listing(ranks)} take"
        more = f", and {len(slow) - 3} more are slow" if len(slow) > 3 else ""
        return f"{who} {ratios} the fastest rank's time per sample{more}, from the first step on."
    if moved:
        return " ".join(_moved(run, change) for change in moved[:3]) + (
            f" Speeds changed lastingly {plural(len(moved), 'time')} in all." if len(moved) > 3 else ""
        )
    share = straggler_share(run)
    most = int(share.argmax())
    if _idle(run) < LITTLE:
        return f"No rank is slow: all {run.workers} take the same time, to {percent(_idle(run))}."
    return (
        f"No rank is slow for good, but each is at times: rank {most} was last most often, in {percent(share[most])} "
        "of the steps."
    )


def _slow(run: Run) -> list[int]:
    """Ranks that were slow in the first half of the steps and in the second, the slowest first."""
    middle = len(run.round) // 2
    own = run.compute / np.maximum(run.loads, 1)
    halves = [median(part) for part in (own[: max(middle, 1)], own[middle:])]
    slow = np.logical_and.reduce([half >= SLOWER * np.nanmin(half) for half in halves])
    return [int(i) for i in np.argsort(-halves[1], kind="stable") if slow[i]]


def _moved(run: Run, change: Change) -> str:
    slower = change.ratio > 1
    ratio = times(change.ratio if slower else 1 / change.ratio)
    first, at = int(run.config.get("first_step", 0)), float(run.time[change.round] - run.time[0])
    since = f"since step {first + run.round[change.round]:,}, {seconds(at)} into the watching"
    return f"Rank {change.worker} is {ratio} {'slower' if slower else 'faster'} than before, {since}."


def _at_what(spent: Spent) -> list[str]:
    """Whether the slowest rank loses its time in loading or in computing."""
    own = spent.loading + spent.computing
    worst = int(np.argmax(own))
    others_loading, others_computing = (
        float(np.median(np.delete(part, worst))) for part in (spent.loading, spent.computing)
    )
    loading = float(spent.loading[worst]) - others_loading
    computing = float(spent.computing[worst]) - others_computing
    if loading + computing < LITTLE * spent.step:
        return []
    if loading > computing:
        return [
            f"Rank {worst} loses it in loading: {seconds(float(spent.loading[worst]))} a step against "
            f"{seconds(others_loading)}; more loader processes or a nearer disk may help before any balancing."
        ]
    return [
        f"Rank {worst} loses it in computing: {seconds(float(spent.computing[worst]))} a step against "
        f"{seconds(others_computing)}."
    ]


def _cost(run: Run, spent: Spent, answer: Answer) -> str:
    idle = _idle(run)
    if idle < LITTLE:
        return f"Waiting for each other takes {percent(idle)} of the ranks' time."
    whom = np.flatnonzero(answer.blame >= 0.8 * answer.blame.sum())
    whose = f" for rank {whom[0]}" if len(whom) else " for each other"
    return (
        f"Waiting{whose} takes {percent(idle)} of all ranks' time: of a step's {seconds(spent.step)}, a rank works "
        f"{seconds(float(np.mean(spent.loading + spent.computing)))} on average."
    )


def _exchange(spent: Spent) -> list[str]:
    share = spent.exchanging / spent.step
    text = f"The exchange of gradients itself takes {seconds(spent.exchanging)} of a step, {percent(share)}"
    if share < MUCH_EXCHANGE:
        return [f"{text}."]
    return [
        f"{text}: no division of the batch shortens that; larger batches, fewer bytes or a faster link do."
    ]


def _lines(run: Run, policy: str) -> list[str]:
    batch = int(np.median(run.batch))
    # The default plans as level does where that is as good.
    chosen = "" if policy in ("level", "auto") else f', policy="{policy}"'
    return [
        f"pace = paceline.torch.Pace(ddp, global_batch={batch}{chosen})",
        "loader = pace.loader(dataset, seed=0)  # instead of DistributedSampler and DataLoader",
        "pace.backward(loss)  # instead of loss.backward()",
        "pace.step(optimizer)  # instead of optimizer.step() and optimizer.zero_grad()",
    ]
