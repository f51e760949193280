"""Draws hosts.svg from the table of docs/hosts.md: samples per second of four frameworks.

python docs/pictures/hosts.py
"""

from __future__ import annotations

from common import BLUE, GREY, ORANGE, figure, rows_of_dots, save, table_after, value

BOUND = 4_500  # samples per second that the sleeps allow


def main() -> None:
    _, rows = table_after("hosts", "Three ranks that sleep")
    made, axes = figure(height=2.6, width=4.6)
    series = {
        "equal": ([value(row[1]) for row in rows], ORANGE, "s"),
        "level": ([value(row[2]) for row in rows], BLUE, "D"),
    }
    rows_of_dots(axes, [row[0].split()[0].strip(",") for row in rows], series, (0, 1.05 * BOUND))
    axes.axvline(BOUND, color=GREY, linestyle=":", zorder=0)
    axes.set_xlabel("samples per second (dotted: what the sleeps allow)")
    save(made, __file__)


if __name__ == "__main__":
    main()
