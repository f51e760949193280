"""Draws server.svg from the table of docs/server.md: seconds to a loss on a parameter server.

python docs/pictures/server.py
"""

from __future__ import annotations

from common import BLUE, figure, rows_of_dots, save, table_after, value


def main() -> None:
    _, rows = table_after("server", "## Figures")
    made, axes = figure(height=3.8, width=4.6)
    rows_of_dots(
        axes, [row[0] for row in rows], {"seconds": ([value(row[2]) for row in rows], BLUE, "o")}, (0, 13)
    )
    axes.legend_.remove()
    axes.set_xlabel("seconds to a loss of 1.5")
    save(made, __file__)


if __name__ == "__main__":
    main()
