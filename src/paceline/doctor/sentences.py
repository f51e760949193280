"""The doctor's sentences: which rank is slow, since when, in which phase, at what cost, and what to try first."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from paceline.doctor.phases import LoopForm, Phase, Slow, Spent
from paceline.rounds import Array
from paceline.runs import Run
from paceline.runs.run import waits
from paceline.runs.summary import WINDOW, ChangePoint, changes, median, seconds_per_sample, straggler_share
from paceline.runs.words import listing, percent, plural, seconds, times

LITTLE = 0.03  # of the ranks' time; less waiting than that is not worth a change
MUCH_EXCHANGE = 0.25  # of a step
MOSTLY_EXCHANGE = 0.5  # of a step; from here on, local steps are proposed
LINK = 0.1  # of the time, for the merges of local steps
MUCH_FETCHING = 0.2  # of a step, on every rank
MAIN = 0.7  # of a rank's lost time; a phase with less is named together with the next one
OFTEN = 0.75  # of the steps; a rank that is last in more of them is named as the slow one
COLLECTING = 0.05  # of the waiting; more waiting for ranks that collect garbage is reported
NAMED = 3  # ranks and changes that are named one by one

COMPUTING = {
    Phase.FORWARD: "in the forward pass",
    Phase.BETWEEN: "between the forward and the backward pass, in the loss or the script's own code",
    Phase.BACKWARD: "in the backward pass",
}
PLACES = {  # the phases in which a rank may lose its time, besides computing
    Phase.FETCH: "in fetching the loader's next batch",
    Phase.PREPARE: "in preparing, the script's own code before the forward pass",
    Phase.MOVE: "in moving the batch to the device",
    Phase.FINISH: "between the exchange and the end of the optimizer's step",
}
REMEDIES = {
    Phase.MOVE: "Before balancing, try pinned memory (pin_memory=True in the loader, non_blocking=True in .to).",
    Phase.PREPARE: "If that time does not grow with the number of samples, balancing gains less than the forecast "
    "below.",
    Phase.FINISH: "That time does not grow with the number of samples, so no division of the batch shortens it.",
}


def who(run: Run, slow: Sequence[Slow], idle: float) -> list[str]:
    """Sentences on slow ranks and then on other changes of speed, or that no rank is slow. idle: share of waiting."""
    dates = dict.fromkeys(each.since for each in slow[:NAMED])
    lines = [_slow(run, [each for each in slow[:NAMED] if each.since == at]) for at in dates]
    if (more := len(slow) - NAMED) > 0:
        lines.append(f"{plural(more, 'more rank')} {'is' if more == 1 else 'are'} slow.")
    known = {(each.rank, each.since) for each in slow}
    others = [each for each in changes(run) if (each.worker, each.round) not in known and _matters(run, each)]
    for change in others[:NAMED]:
        slower = change.ratio > 1
        ratio = times(change.ratio if slower else 1 / change.ratio)
        became = f"{ratio} {'slower' if slower else 'faster'}"
        lines.append(f"Rank {change.worker} became {became} at {_step(run, change.round)}.")
    if len(others) > NAMED:
        lines.append(f"{plural(len(others) - NAMED, 'more lasting change')} of speed followed.")
    if slow:
        return lines
    if idle < LITTLE:
        return [f"No rank is slow: all {run.workers} ranks take nearly the same time.", *lines]
    share = straggler_share(run)
    most = int(share.argmax())
    if share[most] > OFTEN:
        last = f"it was the last one in {percent(share[most])} of the steps"
        return [f"Rank {most} is slow in many steps, but not by the same factor throughout: {last}.", *lines]
    often = f"rank {most} was last most often, in {percent(share[most])} of the steps"
    return [
        f"No rank is slow all the time, but different ranks are slow in different steps: {often}.",
        *lines,
    ]


def waited_for(run: Run) -> float:
    """The portion of all waiting that would not have occurred without garbage collections."""
    rows = run.extras.get("collecting")
    total = float(np.nansum(waits(run.seconds, run.compute)))
    if rows is None or total <= 0:
        return 0.0
    collecting = np.array([each if each is not None else [0.0] * run.workers for each in rows], float)
    without = run.compute - np.minimum(np.nan_to_num(collecting), run.compute)
    return max(total - float(np.nansum(waits(run.seconds, without))), 0.0) / total


def collections(run: Run) -> list[str]:
    """A sentence if enough of the waiting is for garbage collections; else none."""
    part = waited_for(run)
    if part < COLLECTING:
        return []
    return [
        f"{percent(part)} of the waiting is for one rank's garbage collection at a time: "
        "Pace(callbacks=[GarbageCollection(100)]) ends that, or gc.disable() and gc.collect() in the same steps on "
        "all ranks."
    ]


def at_what(spent: Spent, slow: Sequence[Slow], loop: LoopForm) -> list[str]:
    """The phases in which the slowest rank loses its time, and what to try there before balancing."""
    if not slow:
        return []
    rank = slow[0].rank
    mine, others = spent.phases[:, rank], np.median(np.delete(spent.phases, rank, axis=1), axis=1)
    lost = {phase: float(mine[phase] - others[phase]) for phase in PLACES}
    lost[Phase.FORWARD] = float(sum(mine[phase] - others[phase] for phase in COMPUTING))  # all of COMPUTING
    total = sum(max(value, 0.0) for value in lost.values())
    if total < LITTLE * spent.step:
        return []
    order = sorted(lost, key=lambda phase: -lost[phase])
    named = order[:1] if lost[order[0]] >= MAIN * total else order[:2]
    places, more = list[str](), list[str]()
    where = loop.lines[rank] if rank < len(loop.lines) else {}
    for phase in named:
        main = _main(mine, others) if phase is Phase.FORWARD else phase
        parts = list(COMPUTING) if main is None else [main]
        words = (
            "in computing, the forward and the backward pass" if main is None else (PLACES | COMPUTING)[main]
        )
        own, of_others = (seconds(float(each[parts].sum())) for each in (mine, others))
        places.append(f"{words} ({own} per step; the other ranks take {of_others})")
        if main is not None and main.name in where:
            more.append(f"Most of that time goes into {where[main.name]}")
        remedy = _fetching(loop) if phase is Phase.FETCH else REMEDIES.get(phase)
        more += [remedy] if remedy else []
    return [f"Rank {rank} loses its time {' and '.join(places)}.", *more]


def _main(mine: Array, others: Array) -> Phase | None:
    """The phase of computing in which most of the time is lost; None if there is no such phase."""
    lost = {phase: float(mine[phase] - others[phase]) for phase in COMPUTING}
    most = max(lost, key=lambda phase: lost[phase])
    return most if lost[most] >= MAIN * sum(max(value, 0.0) for value in lost.values()) else None


def _fetching(loop: LoopForm) -> str:
    count = 0 if loop.loader is None else int(loop.loader["processes"])
    if count == 0:
        return (
            "The training waits while the loader makes each batch (num_workers=0). Before balancing, try "
            "num_workers=2 or more, so that batches are made while the training computes."
        )
    processes = f"{count} processes" if count > 1 else "process"
    return (
        f"The loader's {processes} cannot keep up. Before balancing, try more processes (num_workers), a faster disk "
        "or cheaper transforms."
    )


def cost(spent: Spent, blame: Array, idle: float, steps: int) -> str:
    """A sentence on the cost of waiting. blame: seconds of waiting for each rank, (n,); idle: share in all steps."""
    if idle < LITTLE:
        return f"Waiting for each other takes {percent(idle)} of all ranks' time."
    blamed = np.flatnonzero(blame >= 0.8 * blame.sum())
    whose = f" for rank {blamed[0]}" if len(blamed) else " for each other"
    # The seconds of a step are medians since the last change of speed; the share covers all steps.
    now = ":" if spent.steps == steps else f" over {steps:,} steps; in the last {spent.steps:,} of them,"
    return (
        f"Waiting{whose} takes {percent(idle)} of all ranks' time{now} a step takes {seconds(spent.step)}, and a "
        f"rank works for {seconds(float(np.mean(spent.own)))} of it on average."
    )


def exchange(spent: Spent, loop: LoopForm, loads: Array) -> list[str]:
    """Sentences on the time of the all-reduce and how to shorten it. loads: samples of each rank in a step, (n,)."""
    share = spent.exchanging / spent.step
    text = f"The exchange of gradients itself takes {seconds(spent.exchanging)} of a step, {percent(share)}"
    if share >= MUCH_EXCHANGE:
        text += ". No division of the batch shortens it; larger batches, fewer bytes or a faster link do"
    sentences = [f"{text}."]
    if loop.exchanges > 1:
        sentences.append(
            f"Each of the {loop.exchanges} backward passes of a step exchanges the gradients. Run all but the last "
            "one under ddp.no_sync() to exchange them once per step."
        )
    elif share >= MOSTLY_EXCHANGE and not loop.host:
        # Seconds between merges, each of which moves as many bytes as an exchange.
        every = float(f"{spent.exchanging * (1 / LINK - 1):.2g}")
        alone = loads.sum() / (loads / spent.own).sum()  # a step's seconds, each rank at its own speed
        would = seconds(alone * (1 + spent.exchanging / every))
        sentences.append(
            f"LocalSGD(model, ..., every='{every:g} s') would take about {would} for as many samples: each "
            "rank takes its own steps, and their parameters are merged at these intervals. This trains another model "
            "than DDP does: docs/local.md says what is lost."
        )
    return sentences


def everybody(spent: Spent, slow: Sequence[Slow], loop: LoopForm, named: bool) -> list[str]:
    """A sentence on what slows all ranks alike, in spite of balancing. named: whether the remedy is named already."""
    quick = np.delete(spent.phases, [each.rank for each in slow], axis=1)
    share = float(np.median(quick[Phase.FETCH])) / spent.step if quick.size else 0.0
    if share < MUCH_FETCHING:
        return []
    subject = "The other ranks" if slow else "The ranks"
    text = f"{subject} spend {percent(share)} of a step in fetching."
    return [text] if named else [f"{text} {_fetching(loop)}"]


def by_hand(loop: LoopForm) -> list[str]:
    """Advice if the change is not printed as a patch of the script."""
    if loop.host:
        return ["A framework runs the loop: docs/hosts.md has all the lines that change."]
    if loop.others:
        return [
            "The script steps several optimizers: pass those of one model to pace.step([first, second]) together; if "
            'it trains several models, docs/porting.md ("Two models") has the loop.'
        ]
    if loop.backwards > 1:
        return [
            "The loop accumulates gradients: use pace.round, whose micro_batch= is what fits into memory, and remove "
            "the loop's own accumulation (loss / k, no_sync, the step in every k-th iteration)."
        ]
    if loop.loader is None:
        return [
            "The batches come from no DataLoader. The change below is for a loop that draws them at random; if yours "
            "reads its data in order, make an indexed data set of the samples and use "
            "pace.loader(dataset, shuffle=False): then the ranks together read the same samples, in the same order."
        ]
    if loop.loader["stream"]:
        return ["The loader reads a stream: pace.stream(stream) draws from it what the plan gives this rank."]
    if loop.loader.get("options", []) is None:
        return [
            "The loader has its own sampler: docs/samples.md and docs/porting.md say what can replace it."
        ]
    return []


def _slow(run: Run, slow: Sequence[Slow]) -> str:
    ranks, ratios = [each.rank for each in slow], listing([times(each.ratio) for each in slow])
    subject = f"Rank {ranks[0]} takes" if len(ranks) == 1 else f"Ranks {listing(ranks)} take"
    at = slow[0].since
    since = f"since {_step(run, at)}" if at else "from the first step on"
    return f"{subject} {ratios} the fastest rank's time per sample, {since}."


def _matters(run: Run, change: ChangePoint) -> bool:
    """Whether the rank was the slowest of all on the slower side of its change."""
    start = change.round if change.ratio > 1 else change.round - WINDOW
    own = median(seconds_per_sample(run)[max(start, 0) : start + WINDOW])
    return bool(own[change.worker] >= np.nanmax(own))


def _step(run: Run, at: int) -> str:
    step = int(run.config.get("first_step", 0)) + int(run.round[at])
    return f"step {step:,}, {seconds(float(run.time[at] - run.time[0]))} after the watch began"
