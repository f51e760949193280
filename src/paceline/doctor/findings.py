"""The diagnosis of a watched run: sentences, figures, the time under each policy, and the change to make, as text for
a terminal and as data for programs.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from rich.console import Console
from rich.table import Table

from paceline import tables
from paceline.commands import line, training
from paceline.doctor import sentences as say
from paceline.doctor.change import DEFAULTS, Change, diff
from paceline.doctor.phases import LoopForm, Phase, Spent, loop, slow, spent
from paceline.errors import PacelineError
from paceline.rounds import Array
from paceline.runs import Run, causes
from paceline.runs.run import waiting_share
from paceline.runs.words import number, times
from paceline.simulate import whatif as compared
from paceline.simulate import worth as having
from paceline.simulate.whatif import WhatIfResult, of_run

POLICIES = ("level", "auto", "dolbie", "lbbsp-gpu", "wlbs")
WORTHWHILE = 0.95  # of the recorded seconds; a smaller gain is within the error of a short watch
BY_LENGTH = (
    0.25  # of the waiting that is due to samples' lengths; from here on, batches should be divided by length
)
SHOWN = 16  # ranks in the table, the slowest first
MILLISECONDS = 2.0  # seconds of a step below which the table is in milliseconds
NEAR = 1.05  # times the fastest policy's seconds, up to which the default policy is preferred


class Diagnosis(NamedTuple):
    """sentences: the most important first. answer: the time under each policy. lines: the script's change, a diff."""

    run: Run
    sentences: list[str]
    spent: Spent
    loop: LoopForm
    answer: WhatIfResult
    lines: list[str]

    @property
    def is_diff(self) -> bool:
        """Whether ``lines`` is a diff of the script; else it is lines to be written by hand, or none."""
        return bool(self.lines) and self.lines[0].startswith("---")


def diagnose(run: Run, policies: Sequence[str] = POLICIES) -> Diagnosis:
    """The diagnosis of a record (see ``probe``). Raises PacelineError if it has no rounds or is not the doctor's."""
    if len(run.round) and "phases" not in run.extras:
        raise PacelineError(f"{run.path} is no record of the doctor; expected one that it wrote with --out")
    if len(run.round) and not run.batch.any():
        raise PacelineError(
            "the forward pass is given no tensor to count samples by; expected one whose first dimension is the batch"
        )
    answer = of_run(run, policies)
    gains = having.of_run(run, spent(run).exchanging, "rank")
    # All of a rank's own time decides whether it is slow; the forecasts above use the part that grows with samples.
    run = replace(run, overhead=np.zeros_like(run.overhead))
    figures, form, slowest = spent(run), loop(run), slow(run)
    take, idle = _take(answer), waiting_share(run.seconds, run.compute) or 0.0
    lost = say.at_what(figures, slowest, form)
    why = []
    if answer.causes is not None and idle >= say.LITTLE:
        why = [causes.sentence(answer.causes, "rank")]
        if answer.causes.data >= BY_LENGTH:
            why.append(
                "Divide by length, not by count: pace.loader(dataset, cost=lengths), see docs/samples.md."
            )
    sentences = [
        *say.who(run, slowest, idle),
        *why,
        *say.collections(run),
        *lost,
        say.cost(figures, answer.blame, idle, len(run.round)),
        *say.exchange(figures, form, np.median(run.loads[-figures.steps :], axis=0)),
        *gains,
        *say.everybody(figures, slowest, form, named=any("num_workers" in each for each in lost)),
    ]
    worth = bool(take) and idle >= say.LITTLE
    lines, missing = diff(form, run.workers, take) if worth else Change([])
    if worth and not lines[0].startswith("---"):
        sentences += say.by_hand(form)
        if missing:
            sentences.append(f"No diff of your script is printed: the doctor looked for {missing}.")
    if worth and not form.host and (form.loader or {}).get("whole"):
        sentences.append(
            "Each rank reads the whole data set, as the loader has no DistributedSampler. With the change the ranks "
            f"share each epoch: each sample counts once, and {run.workers} epochs have as many steps as one has now."
        )
    if form.compares:
        sentences.append(
            "The loss compares the samples of a batch with each other, or chooses among them, so that its value "
            "depends on how the batch is divided, by plain DDP as well: see docs/porting.md (Losses that compare "
            "samples)."
        )
    if not form.sure:
        sentences.append(
            "The number of samples in a batch is unknown, as no DataLoader draws them on each rank: the tables show "
            "rows, the first dimension of the model's input"
            + (". Write the number of samples of a backward pass for batch_size." if worth else ".")
        )
    if not worth:
        end = "" if lost else ": leave the script as it is"
        sentences.append(f"Balancing would gain almost nothing here{end}.")
    return Diagnosis(run, sentences, figures, form, answer, lines)


def show(
    found: Diagnosis,
    console: Console | None = None,
    command: Sequence[str] | None = None,
    patch: Path | None = None,
) -> None:
    """Print the sentences, each rank's time, the time under each policy, the change to the script, and how to check
    it. command: the command that starts the training; by default that of this rank. patch: the file that
    has the change."""
    console = console or Console(highlight=False, soft_wrap=True)
    for sentence in found.sentences:
        tables.say(console, sentence)
    unit = "ms" if found.spent.step < MILLISECONDS else "s"
    console.print()
    scale = 1e3 if unit == "ms" else 1.0
    alike = _alike(found)
    part = "a step" if alike is None else f"a step of {number(alike)} {_counted(found)}"
    steps = (
        f"medians of {found.spent.steps:,} steps; the exchange takes {number(scale * found.spent.exchanging)}"
    )
    tables.say(console, f"Where {part} goes on each rank, in {unit} ({steps}):")
    tables.print_whole(console, _ranks(found, scale))
    tables.say(console, "How long the same batches would have taken under other divisions:")
    tables.print_whole(console, compared.table(found.answer, "loads" if found.loop.sure else "rows"))
    if found.lines:
        how = "to be made by hand, with the script's own names"
        if found.is_diff:
            how = "for `patch -p0`"
        tables.say(console, f"The change that balances it, {how} (docs/training.md explains it):")
        tables.show_lines(found.lines, console)
        if patch is not None:
            tables.say(console, "This applies it:")
            tables.show_lines([f"patch -p0 < {shlex.quote(str(patch))}"], console)
        tables.say(
            console, "Then check that the changed script trains the same model whatever the loads are:"
        )
        tables.show_lines([line("verify", "--", *(command or training()))], console)


def _counted(found: Diagnosis) -> str:
    return "samples" if found.loop.sure else "rows"


def _alike(found: Diagnosis) -> float | None:
    """The samples of every rank, if these are the same and a column of them makes the table wider than 60 columns."""
    loads = np.median(found.run.loads, axis=0)
    fetch, _, move, *_ = found.spent.phases
    return float(loads[0]) if fetch.any() and move.any() and (loads == loads[0]).all() else None


def _ranks(found: Diagnosis, scale: float) -> Table:
    spent = found.spent
    fetch, prepare, move, *_, finish = spent.phases
    columns: list[tuple[str, Array]] = [
        *([("fetch", fetch)] if fetch.any() else []),
        ("prepare", prepare),
        *([("move", move)] if move.any() else []),
        *[("compute", spent.computing), ("update", finish), ("wait", spent.waiting)],
    ]
    load = () if _alike(found) is not None else (_counted(found),)
    shown = tables.begun(figures=("rank", *load, *(head for head, _ in columns), "slower"))
    order = np.argsort(-np.nan_to_num(spent.slowness), kind="stable")[:SHOWN]
    for rank in sorted(order) if len(order) == found.run.workers else order:
        shown.add_row(
            str(rank),
            *(number(float(np.median(found.run.loads[:, rank]))) for _ in load),
            *(number(scale * float(values[rank])) for _, values in columns),
            times(float(spent.slowness[rank])),
        )
    return shown


def to_json(found: Diagnosis) -> dict[str, Any]:
    """The whole diagnosis for programs, by the names of its fields."""
    phases = {phase.name.lower(): found.spent.phases[phase] for phase in Phase}
    return found._asdict() | {
        "spent": found.spent._asdict() | {"phases": phases},
        "steps": len(found.run.round),
        "run": str(found.run.path),
        "take": _take(found.answer) or None,
    }


def _take(answer: WhatIfResult) -> str:
    """The fastest policy, or one of DEFAULTS if that is almost as fast; "" if no policy gains."""
    if not answer.best or answer.policies[answer.best].seconds > WORTHWHILE * answer.seconds:
        return ""
    enough = NEAR * answer.policies[answer.best].seconds
    near = [name for name in DEFAULTS if name in answer.policies and answer.policies[name].seconds <= enough]
    return near[0] if near else answer.best
