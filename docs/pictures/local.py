"""Draws local.svg from the tables of docs/local.md: the time to plain DDP's loss.

python docs/pictures/local.py
"""

from __future__ import annotations

from common import BLUE, GREEN, figure, rows_of_dots, save, table_after, value


def main() -> None:
    _, mnist = table_after("local", "a part of DDP's time.")
    _, gpt = table_after("local", "claimed steps | 73,056")
    both = [row[0] for row in mnist if "runs" not in row[-1]]
    ours = {row[0]: value(row[-1]) for row in gpt if "runs" not in row[-1]}
    made, axes = figure(height=4.2, width=4.6)
    series = {
        "MNIST": ([value(row[-1]) for row in mnist if row[0] in both], BLUE, "o"),
        "GPT": ([ours.get(name, float("nan")) for name in both], GREEN, "D"),
    }
    rows_of_dots(axes, both, series, (0, 105))
    axes.set_xlabel("time to DDP's loss, % of DDP's")
    save(made, __file__)


if __name__ == "__main__":
    main()
