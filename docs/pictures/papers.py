"""Draws papers.svg from the readings of docs/papers.md: by how much DOLBIE's round 40 is shorter.

python docs/pictures/papers.py
"""

from __future__ import annotations

import re

from common import BLUE, GREEN, GREY, ORANGE, figure, rows_of_dots, save, table_after

STYLE = ((ORANGE, "s"), (BLUE, "D"), (GREEN, "o"))


def numbers(cell: str) -> list[float]:
    """The numbers of a cell such as ``45/26/24/13 %``."""
    return [float(each) for each in re.findall(r"-?[\d.]+", cell)]


def main() -> None:
    head, rows = table_after("papers", "`paceline reproduce dolbie NAME`")
    first = rows[0]  # Fig. 3
    made, axes = figure(height=2.8, width=4.6)
    series = {"printed": (numbers(first[1]), GREY, "v")}
    for (colour, shape), name, cell in zip(STYLE, head[2:], first[2:], strict=True):
        series[name.removeprefix("ours: ")] = numbers(cell), colour, shape
    rows_of_dots(axes, ["EQU", "OGD", "LB-BSP", "ABS"], series, (-5, 100))
    axes.set_xlabel("DOLBIE's round 40 is shorter by, %")
    save(made, __file__)


if __name__ == "__main__":
    main()
