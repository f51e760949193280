"""Draws policies.svg from a table of docs/policies.md: seconds to a loss where workers stall.

python docs/pictures/policies.py
"""

from __future__ import annotations

from common import BLUE, GREEN, ORANGE, figure, rows_of_dots, save, table_after, value

COLUMNS = {
    "stretched": (2, BLUE, "o"),
    "half 3x slower": (3, GREEN, "D"),
    "before the task": (4, ORANGE, "s"),
}


def main() -> None:
    _, rows = table_after("policies", "## It stalls")
    made, axes = figure(height=4.8, width=4.6)
    series = {name: ([value(row[k]) for row in rows], *style) for name, (k, *style) in COLUMNS.items()}
    rows_of_dots(axes, [row[0] for row in rows], series, (0, 53))
    axes.set_xlabel("seconds to the same loss; stalls are 70 % of a mean task")
    save(made, __file__)


if __name__ == "__main__":
    main()
