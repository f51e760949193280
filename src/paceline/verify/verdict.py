"""The verdict: one sentence, a table of the runs, and what may have caused a difference, with its lines."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from rich.console import Console

from paceline.verify.compare import (
    Difference,
    Distance,
    RunLog,
    difference,
    epoch_steps,
    schedule,
    settled,
    site,
    still,
    tolerance,
    unowned,
)

STILL = (
    "cannot tell: all gradients are zero, so nothing can be compared; let the loss depend on the parameters"
)


@dataclass(frozen=True)
class Verdict:
    """exact: whether the program trains the same model for any loads; None if that is unknown."""

    exact: bool | None
    sentence: str
    tolerance: float
    noise: float
    runs: list[Difference]
    suspects: list[str]
    notes: list[str]
    skipped: list[str]
    schedule: list[str]  # what differs in the options of the optimizers from the unported program


def judged(runs: list[RunLog], allowed: float | None = None, unported: RunLog | None = None) -> Verdict:
    """The verdict on the runs of a program: the first two have equal loads. allowed: the largest relative
    difference; by default what rounding explains. unported: the program as it was before."""
    first, *others = runs
    limit = tolerance(runs) if allowed is None else allowed
    differences = [difference(first, run) for run in others if run.steps]
    noise, *found = differences
    apart = next((each for each in differences if not each.alike(limit)), None)
    other = next((each for each in found if not each.same(limit)), None)
    unlike = [] if unported is None else schedule(first, unported)
    exact: bool | None = False
    if apart is not None:
        sentence = f"not exact with loads {_loads(apart.loads)}: {_between_ranks(apart, limit)}"
    elif not noise.same(limit):
        exact, sentence = None, _unknown(noise, limit)
    elif other is not None and (loose := unowned(runs)):
        exact, sentence = None, _loose(loose[0], other, limit)
    elif other is not None:
        sentence = f"not exact with loads {_loads(other.loads)}: {_between_runs(other, limit)}"
    elif not found:
        exact, sentence = None, "cannot tell: the limits of Pace leave no room for other loads; give --loads"
    elif still(runs):
        exact, sentence = None, STILL
    elif unlike:
        sentence = f"another schedule than the unported program's: {unlike[0]}"
    else:
        exact, sentence = True, _exact(found)
    suspects = [] if exact else list(dict.fromkeys([*_suspects(runs, differences, limit), *unlike]))
    notes = _notes(first, exact)
    if unported is not None and not unlike:
        notes.append(_same_schedule(first, unported))
    skipped = [run.name for run in others if not run.steps]
    return Verdict(exact, sentence, limit, noise.worst.size, found, suspects, notes, skipped, unlike)


def _same_schedule(first: RunLog, unported: RunLog) -> str:
    both = len({number for number, _ in first.steps.keys() & unported.steps.keys()})
    epoch = epoch_steps(unported)
    steps = "" if epoch is None else f", and an epoch has {epoch} steps there"
    return f"learning rates and other options are those of the unported program over {_steps(both)}{steps}"


def _exact(found: list[Difference]) -> str:
    worst = max(each.worst.size for each in found)
    *most, last = [_loads(each.loads) for each in found]
    loads = " and ".join(filter(None, (", ".join(most), last)))
    steps = min(each.steps for each in found)
    return f"exact to {worst:.1g} over {_steps(steps)} with loads {loads}"


def _steps(number: int) -> str:
    return f"{number} {'step' if number == 1 else 'steps'}"


def _unknown(noise: Difference, limit: float) -> str:
    return (
        f"cannot tell: two runs with equal loads differ already: {_between_runs(noise, limit)}; let the program draw "
        "its random numbers with a fixed seed, and read the same data in each run"
    )


def _loose(line: dict[str, Any], found: Difference, limit: float) -> str:
    return (
        f"cannot tell: {_at(line)} draws {line['name']} numbers whose count follows from the samples, without a row "
        f"for each of them, so runs with other loads draw others ({_between_runs(found, limit)}); switch it off, for "
        "example with dropout 0, and verify again"
    )


def _between_runs(found: Difference, limit: float) -> str:
    """The first thing that differs between two runs, the gradient before all others."""
    if far := [each for each in found.gradients if each.size > limit]:
        return f"from step {far[0].step + 1}, {_size(far[0])} in {far[0].name}"
    if found.absent:
        step, name = found.absent[0]
        return f"at step {step + 1}, the gradient of {name} is None in one run only, and 0 in the other"
    if sentences := [*found.options, *found.counts]:
        return sentences[0]
    far = [each for each in found.states if each.size > limit]
    return f"from step {far[0].step + 1}, {_size(far[0])} in {far[0].name}"


def _between_ranks(found: Difference, limit: float) -> str:
    """The first thing that differs between the ranks of a run."""
    if found.unlike:
        return found.unlike[0]
    far = [each for each in found.apart if each.size > limit]
    return f"from step {far[0].step + 1}, the ranks differ by {_size(far[0])} in {far[0].name}"


def _size(distance: Distance) -> str:
    return f"{distance.size:.2g}"


def _loads(loads: list[int]) -> str:
    return "/".join(map(str, loads))


def _suspects(runs: list[RunLog], found: list[Difference], limit: float) -> list[str]:
    """What may have caused it, the likely first."""
    first, suspects = runs[0], []
    passed = {each[2] for line in first.lines("step") for each in line["losses"]}
    kinds = {each.loss for each in found[1:] if each.loss}
    injected = _lines(first, "injected")
    for line in injected:
        suspects.append(
            f"{_at(line)}: the autograd function {line['name']} makes a gradient that does not come from the "
            'loss, so no weight reaches it; use Pace(..., weigh="hook")'
        )
    far = any(each.worst.size > limit for each in found)
    if far and "sum" in kinds and not passed & {"sum", "global"}:
        suspects.append(
            "the loss grows with the samples of its rank, and is passed as a mean; write "
            'pace.backward(loss, "sum"), or pace.backward(loss, "global") if it is divided by a number of all ranks'
        )
    elif far and "whole" in kinds and "global" not in passed:
        suspects.append(
            "the loss is the same on all ranks, and is passed as a mean over this rank's samples; write "
            'pace.backward(loss, "global") if it is a function of a statistic of all ranks'
        )
    elif far and "other" in kinds:
        suspects.append(
            "the loss is neither a mean nor a sum of a loss of each sample: it compares samples, or divides by "
            "another number than this rank's samples, which count= says"
        )
    warned = _first(_warnings(run) for run in runs[1:])
    suspects += [words for words in warned if not any(line["name"] in words for line in injected)]
    for line in _lines(first, "collective"):
        suspects.append(
            f"{_at(line)}: {line['name']} on {line['elements']} elements between the batch and the optimizer's step"
        )
    suspects += _first(
        [
            f"the gradient of {name} is None in one run only, from step {step + 1}"
            for step, name in each.absent[:1]
        ]
        for each in found
    )
    for part in ("unlike", "options", "counts"):
        suspects += _first(getattr(each, part) for each in found)
    suspects += _first(_beyond(each.apart, limit, "differs between ranks") for each in found)
    suspects += _first(_beyond(each.states, limit, "differs between runs") for each in found)
    suspects += _draws(first)
    known = settled(runs)
    suspects += [
        f"{_at(line)}: the random draw {line['name']} has as many entries as samples in several dimensions; "
        "give another global batch, so that one alone fits"
        for line in _lines(first, "square draw")
        if site(line) not in known
    ]
    if far and not suspects:
        suspects.append(
            "nothing was noticed in the program; its loss may compare the samples of a batch with each other, or be "
            "divided by another number than this rank's samples"
        )
    return list(dict.fromkeys(suspects))


def _warnings(run: RunLog) -> list[str]:
    """What Paceline warned of on this run's first rank that has a warning."""
    return _first(
        [line["name"] for line in lines if line["kind"] == "warning"] for lines in run.ranks.values()
    )


def _first(found: Iterable[list[str]]) -> list[str]:
    """The sentences on the first run that there are any on."""
    return next(filter(None, found), [])


def _beyond(distances: list[Distance], limit: float, what: str) -> list[str]:
    """A sentence on the first distance that is too large."""
    far = [each for each in distances if each.size > limit]
    return [f"{each.name} {what}, by {_size(each)} at step {each.step + 1}" for each in far[:1]]


def _draws(first: RunLog) -> list[str]:
    found = [
        f"{_at(line)}: the random draw {line['name']} has no row for each sample"
        for line in _lines(first, "draw")
    ]
    found += [
        f"{line['name']} draws random numbers within a step, not in the data set: no sample owns them"
        for line in _lines(first, "other draw")
    ]
    return found


def _notes(first: RunLog, exact: bool | None) -> list[str]:
    """What was changed in the program to compare it."""
    notes = []
    norms, recurrent = _lines(first, "batch norm"), _lines(first, "recurrent")
    if norms:
        notes.append(
            f"batch norm was in evaluation mode ({len(norms)} layers); --batch-norm leaves it as it is"
        )
    if recurrent:
        names = ", ".join(line["name"] for line in recurrent)
        notes.append(f"dropout between the layers of {names} was switched off: its kernel draws by itself")
    return notes + (_draws(first) if exact else [])


def _lines(run: RunLog, kind: str) -> list[dict[str, Any]]:
    """The lines of one kind, each once."""
    found: dict[str, dict[str, Any]] = {}
    for line in run.lines(kind):
        found.setdefault(f"{line.get('name')} {line.get('file')} {line.get('line')}", line)
    return list(found.values())


def _at(line: dict[str, Any]) -> str:
    return f"{os.path.relpath(line['file']) if line['file'] else '?'}:{line['line']}"


def show(verdict: Verdict, console: Console) -> None:
    """Print the verdict."""
    console.print(verdict.sentence, markup=False)
    if verdict.suspects:
        console.print("\nWhat may cause it:")
        for suspect in verdict.suspects:
            console.print(f"  - {suspect}", markup=False)
    for name in verdict.skipped:
        console.print(f"Note: the limits of Pace or the memory left no room for {name} loads.", markup=False)
    for note in verdict.notes:
        console.print(f"Note: {note}.", markup=False)


def to_json(verdict: Verdict) -> dict[str, Any]:
    """The verdict as plain data."""
    return {
        "exact": verdict.exact,
        "sentence": verdict.sentence,
        "tolerance": verdict.tolerance,
        "noise": verdict.noise,
        "runs": [
            {
                "loads": each.loads,
                "steps": each.steps,
                "gradients": [one._asdict() for one in each.gradients],
                "absent": [{"step": step, "name": name} for step, name in each.absent],
                "options": [*each.unlike, *each.options],
                "counts": each.counts,
                "states": [one._asdict() for one in each.states],
                "ranks": [one._asdict() for one in each.apart],
                "loss": each.loss,
            }
            for each in verdict.runs
        ],
        "skipped": verdict.skipped,  # loads for which the limits of Pace leave no room
        "schedule": verdict.schedule,
        "suspects": verdict.suspects,
        "notes": verdict.notes,
    }
