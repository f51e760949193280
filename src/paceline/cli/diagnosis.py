"""What ``paceline doctor`` found, for a terminal."""

from __future__ import annotations

import textwrap

import numpy as np
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from paceline.cli.whatif import table as policies
from paceline.doctor.findings import Diagnosis
from paceline.doctor.phases import Phase
from paceline.rounds import Array
from paceline.runs.words import number, seconds, times

SHOWN = 16  # ranks in the table, the slowest first
WIDTH = 80  # columns that are always used: a narrower window wraps its lines, and no figure is cut


def show(found: Diagnosis, console: Console | None = None) -> None:
    """Print the sentences, each rank's time, what each policy would give, and the change to the script."""
    console = console or Console(highlight=False, soft_wrap=True)
    console.width = max(console.width, WIDTH)
    for sentence in found.sentences:
        _say(console, sentence)
    console.print()
    _say(console, f"Where a step goes, on each rank (medians of {found.spent.steps:,} steps):")
    console.print(_ranks(found))
    _say(console, "What other divisions of the same batches would have made of it:")
    console.print(policies(found.answer))
    if found.lines:
        _say(console, "The change that balances it (docs/training.md explains it):")
        for line in found.lines:
            _say(console, f"  {line}")


def _say(console: Console, text: str) -> None:
    """One line, broken between words on a terminal."""
    if console.is_terminal:
        text = "\n".join(textwrap.wrap(text, console.width, break_on_hyphens=False))
    console.print(text, markup=False, highlight=False)


def _ranks(found: Diagnosis) -> Table:
    spent = found.spent
    columns: list[tuple[str, Array]] = [
        ("fetch", spent.phases[Phase.FETCH]),
        ("prepare", spent.phases[Phase.PREPARE]),
        ("move", spent.phases[Phase.MOVE]),
        ("compute", spent.computing),
        ("optimizer", spent.phases[Phase.FINISH]),
        ("wait", spent.waiting),
    ]
    columns = [(head, values) for head, values in columns if head not in ("fetch", "move") or values.any()]
    shown = Table(box=SIMPLE_HEAD, pad_edge=False, show_edge=False, padding=(0, 1, 0, 0))
    for head in ("rank", "samples", *(head for head, _ in columns), "exchange", "slowness"):
        shown.add_column(head, justify="right", no_wrap=True)
    order = np.argsort(-np.nan_to_num(spent.slowness), kind="stable")[:SHOWN]
    for rank in sorted(order) if len(order) == found.run.workers else order:
        shown.add_row(
            str(rank),
            number(float(np.median(found.run.loads[:, rank]))),
            *(seconds(float(values[rank])) for _, values in columns),
            seconds(spent.exchanging),
            times(float(spent.slowness[rank])),
        )
    return shown
