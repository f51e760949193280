"""Draws porting.svg from docs/data/porting.csv: seconds of ported programs.

python docs/pictures/porting.py
"""

from __future__ import annotations

from common import BLUE, ORANGE, figure, records, rows_of_dots, save, value


def main() -> None:
    _, rows = records("porting")
    made, axes = figure(height=5.2, width=4.6)
    series = {
        "before": ([value(row[2]) for row in rows], ORANGE, "s"),
        "after": ([value(row[3]) for row in rows], BLUE, "D"),
    }
    rows_of_dots(axes, [row[0].split(";")[0].split(" (")[0] for row in rows], series, (0, 80))
    axes.set_xlabel("seconds of 24 steps")
    save(made, __file__)


if __name__ == "__main__":
    main()
