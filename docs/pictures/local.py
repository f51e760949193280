"""Draws local.svg from docs/data/local.csv: the time to plain DDP's loss.

python docs/pictures/local.py
"""

from __future__ import annotations

from common import BLUE, GREEN, figure, records, rows_of_dots, save, value


def main() -> None:
    _, rows = records("local")
    taken = {(task, way): value(last) for task, way, *_, last in rows if last}
    ways = list(dict.fromkeys(way for _, way in taken))
    made, axes = figure(height=4.2, width=4.6)
    series = {
        task: ([taken.get((task, way), float("nan")) for way in ways], *style)
        for task, style in (("MNIST", (BLUE, "o")), ("GPT", (GREEN, "D")))
    }
    rows_of_dots(axes, ways, series, (0, 105))
    axes.set_xlabel("time to DDP's loss, % of DDP's")
    save(made, __file__)


if __name__ == "__main__":
    main()
