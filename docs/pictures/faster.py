"""Draws faster.svg from the table of docs/figures.md: shares of the bound.

python docs/pictures/faster.py
"""

from __future__ import annotations

from common import dots, figure, save


def main() -> None:
    made, axes = figure(height=4, width=4.6)
    dots(axes, "How much faster?", {"plain DDP": 1, "fixed split": 2, "level": 3, "auto": 4}, (0, 100))
    axes.set_xlabel("share of the bound, %")
    save(made, __file__)


if __name__ == "__main__":
    main()
