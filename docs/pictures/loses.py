"""Draws loses.svg from the table of docs/figures.md: times relative to the better alternative.

python docs/pictures/loses.py
"""

from __future__ import annotations

from common import GREY, dots, figure, save


def main() -> None:
    made, axes = figure(height=3.8, width=4.6)
    dots(axes, "When does it lose?", {"level": 3, "auto": 4}, (0.95, 4.2), over=2)
    axes.axvline(1, color=GREY, linestyle=":", zorder=0)
    axes.set_xscale("log")
    axes.set_xticks([1, 1.5, 2, 3, 4], ["1", "1.5", "2", "3", "4"])
    axes.minorticks_off()
    axes.set_xlabel("times as long as the alternative; right of the line is worse")
    save(made, __file__)


if __name__ == "__main__":
    main()
