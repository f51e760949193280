"""Draws costs.svg from the table of docs/figures.md: a round relative to plain DDP's.

python docs/pictures/costs.py
"""

from __future__ import annotations

from common import GREY, dots, figure, save


def main() -> None:
    made, axes = figure(height=6, width=4.6)
    dots(axes, "What does it cost?", {"equal": 2, "level": 3, "auto": 4}, (0.8, 1.5))
    axes.axvline(1, color=GREY, linestyle=":", zorder=0)
    axes.set_xlabel("relative to plain DDP; left of the line is better")
    save(made, __file__)


if __name__ == "__main__":
    main()
