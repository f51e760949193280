"""What ``paceline doctor`` found, for a terminal."""

from __future__ import annotations

import numpy as np
from rich.console import Console
from rich.table import Table

from paceline import tables
from paceline.doctor.findings import Diagnosis
from paceline.doctor.phases import Phase
from paceline.rounds import Array
from paceline.runs.words import number, times
from paceline.simulate import whatif

SHOWN = 16  # ranks in the table, the slowest first
MILLISECONDS = 2.0  # seconds of a step below which the table is in milliseconds


def show(found: Diagnosis, console: Console | None = None) -> None:
    """Print the sentences, each rank's time, what each policy would give, and the change to the script."""
    console = console or Console(highlight=False, soft_wrap=True)
    for sentence in found.sentences:
        tables.say(console, sentence)
    unit = "ms" if found.spent.step < MILLISECONDS else "s"
    console.print()
    tables.say(
        console, f"Where a step goes on each rank, in {unit} (medians of {found.spent.steps:,} steps):"
    )
    tables.print_whole(console, _ranks(found, 1e3 if unit == "ms" else 1.0))
    tables.say(console, "What other divisions of the same batches would have made of it:")
    tables.print_whole(console, whatif.table(found.answer))
    if found.lines:
        tables.say(console, "The change that balances it (docs/training.md explains it):")
        for line in found.lines:
            console.print(f"  {line}", markup=False, highlight=False)


def _ranks(found: Diagnosis, scale: float) -> Table:
    spent = found.spent
    columns: list[tuple[str, Array]] = [
        ("fetch", spent.phases[Phase.FETCH]),
        ("prepare", spent.phases[Phase.PREPARE]),
        ("move", spent.phases[Phase.MOVE]),
        ("compute", spent.computing),
        ("optimizer", spent.phases[Phase.FINISH]),
        ("wait", spent.waiting),
        ("exchange", np.full(found.run.workers, spent.exchanging)),
    ]
    columns = [(head, values) for head, values in columns if head not in ("fetch", "move") or values.any()]
    shown = tables.begun(figures=("rank", "samples", *(head for head, _ in columns), "slower"))
    order = np.argsort(-np.nan_to_num(spent.slowness), kind="stable")[:SHOWN]
    for rank in sorted(order) if len(order) == found.run.workers else order:
        shown.add_row(
            str(rank),
            number(float(np.median(found.run.loads[:, rank]))),
            *(number(scale * float(values[rank])) for _, values in columns),
            times(float(spent.slowness[rank])),
        )
    return shown
