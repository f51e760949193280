"""Sentences, lines to paste, and tables of figures for a terminal."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from rich.box import SIMPLE_HEAD
from rich.cells import cell_len
from rich.console import Console
from rich.segment import Segment, Segments
from rich.table import Table

WIDTH = 60  # columns that a table takes if its cells allow it
UNBOUNDED = 10_000  # columns, more than any table needs


def begun(*first: str, figures: tuple[str, ...] = ()) -> Table:
    """A table without rows. first: headings of text columns; figures: of the columns of numbers to their right."""
    shown = Table(box=SIMPLE_HEAD, pad_edge=False, show_edge=False, padding=(0, 1, 0, 0))
    for head in first:
        shown.add_column(head, no_wrap=True)
    for head in figures:
        shown.add_column(head, justify="right", no_wrap=True)
    return shown


def say(console: Console, sentence: str) -> None:
    """Prints one line, wrapped between words on a terminal."""
    if console.is_terminal:
        lines = textwrap.wrap(sentence, console.width, break_on_hyphens=False, break_long_words=False)
        sentence = "\n".join(lines)
    console.print(sentence, markup=False, highlight=False)


def show_lines(lines: Sequence[str], console: Console) -> None:
    """Print the lines unchanged: rich would replace tabs by blanks, and words between colons by emoji."""
    console.print(Segments(Segment(f"  {line}\n") for line in lines), end="", soft_wrap=True)


def print_whole(console: Console, table: Table) -> None:
    """Prints a table in full width: a narrow window breaks its lines, but no figure is cut.

    Headings of a table wider than ``WIDTH`` are wrapped between words, down to the width of their columns' cells.
    """
    if _wanted(console, table) > WIDTH:
        for column in table.columns:
            head, *cells = (str(cell) for cell in (column.header, *column._cells))
            width = max(map(cell_len, (*cells, *head.split())), default=1)
            column.header = "\n".join(textwrap.wrap(head, width, break_on_hyphens=False))
    shown = console.width
    console.width = max(shown, _wanted(console, table))
    console.print(table)
    console.width = shown


def _wanted(console: Console, table: Table) -> int:
    """The columns of a terminal that the table takes."""
    return console.measure(table, options=console.options.update(width=UNBOUNDED)).maximum
