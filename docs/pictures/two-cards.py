"""Draws two-cards.svg from the table of docs/two-cards.md: speed of two uneven cards together.

python docs/pictures/two-cards.py
"""

from __future__ import annotations

from common import BLUE, GREY, ORANGE, figure, save, table_after, value


def main() -> None:
    _, rows = table_after("two-cards", "## What to expect")
    ratios = [value(row[0]) for row in rows]
    made, axes = figure(height=2.8, width=4.6)
    for column, name, colour, shape in ((1, "balanced", BLUE, "D"), (2, "equal shares", ORANGE, "s")):
        axes.plot(
            ratios, [value(row[column].rstrip("x")) for row in rows], shape + "-", color=colour, label=name
        )
    axes.axhline(1, color=GREY, linestyle=":", label="the fast card alone")
    axes.set_xlabel("times as fast as the slow card")
    axes.set_ylabel("speed of both")
    axes.set_ylim(0, 2.1)
    axes.legend(frameon=False, fontsize=9)
    save(made, __file__)


if __name__ == "__main__":
    main()
