"""Draws faults.svg from docs/data/faults.csv: seconds without a completed round after a fault.

python docs/pictures/faults.py
"""

from __future__ import annotations

from common import BLUE, GREEN, ORANGE, PURPLE, figure, records, rows_of_dots, save, value

STYLE = ((BLUE, "o"), (GREEN, "D"), (ORANGE, "s"), (PURPLE, "v"))


def main() -> None:
    head, rows = records("faults")
    made, axes = figure(height=4.6, width=4.6)
    series = {
        name: ([value(row[column]) for row in rows], *STYLE[column - 1])
        for column, name in enumerate(head)
        if column
    }
    rows_of_dots(axes, [row[0] for row in rows], series, (0, 2.3))
    axes.legend(frameon=False, fontsize=8, loc="lower center", bbox_to_anchor=(0.5, 1), ncols=2)
    axes.set_xlabel("seconds without a completed round")
    save(made, __file__)


if __name__ == "__main__":
    main()
