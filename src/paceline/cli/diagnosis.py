"""What ``paceline doctor`` found, for a terminal."""

from __future__ import annotations

import numpy as np
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from paceline.cli.whatif import table as policies
from paceline.doctor.findings import Diagnosis
from paceline.runs.words import number, seconds, times

SHOWN = 16  # ranks in the table, the slowest first


def show(found: Diagnosis, console: Console | None = None) -> None:
    """Print the sentences, each rank's time, what each policy would give, and the lines to add."""
    console = console or Console(soft_wrap=True)
    for sentence in found.sentences:
        console.print(sentence, markup=False, highlight=False)
    console.print(
        f"\nA step's time, median of {len(found.run.round):,}:",
        highlight=False,
    )
    console.print(_ranks(found))
    console.print("What other divisions of the same batches would have made of it:")
    console.print(policies(found.answer))
    if found.lines:
        console.print("Lines for the script (docs/training.md has the whole of it):")
        for line in found.lines:
            console.print(f"    {line}", markup=False, highlight=False)


def _ranks(found: Diagnosis) -> Table:
    spent = found.spent
    shown = Table(box=SIMPLE_HEAD, pad_edge=False, show_edge=False, padding=(0, 1, 0, 0))
    for head in (
        "rank",
        "samples",
        "loading",
        "computing",
        "waiting",
        "exchanging",
        "per sample, of the fastest's",
    ):
        shown.add_column(head, justify="right", no_wrap=True)
    order = np.argsort(-np.nan_to_num(spent.slowness), kind="stable")[:SHOWN]
    for rank in sorted(order) if len(order) == found.run.workers else order:
        shown.add_row(
            str(rank),
            number(float(np.median(found.run.loads[:, rank]))),
            *(seconds(float(part[rank])) for part in (spent.loading, spent.computing, spent.waiting)),
            seconds(spent.exchanging),
            times(float(spent.slowness[rank])),
        )
    return shown
