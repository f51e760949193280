"""Draws service.svg from the table of docs/service.md: milliseconds from a request to its answer.

python docs/pictures/service.py
"""

from __future__ import annotations

from common import BLUE, ORANGE, figure, rows_of_dots, save, table_after, value


def main() -> None:
    _, rows = table_after("service", "## How fast it is")
    made, axes = figure(height=2.6, width=4.6)
    series = {
        "median": ([value(row[1]) for row in rows], BLUE, "o"),
        "p99": ([value(row[2]) for row in rows], ORANGE, "s"),
    }
    rows_of_dots(axes, [row[0] for row in rows], series, (0, 230))
    axes.set_xlabel("milliseconds")
    save(made, __file__)


if __name__ == "__main__":
    main()
