"""Draws doctor.svg from the example of docs/doctor.md: where a step of three ranks goes.

python docs/pictures/doctor.py
"""

from __future__ import annotations

import re

from common import BLUE, FOLDER, ORANGE, figure, save, waiting

FETCH, COMPUTE, WAIT = 0, 2, 4  # columns of the example's table, after rank and samples


def main() -> None:
    page = (FOLDER.parent / "doctor.md").read_text(encoding="utf-8")
    found = re.findall(r"^ +(\d) +\d+ +(.+) +[\d.]+x$", page, re.MULTILINE)
    ranks = [f"rank {rank}" for rank, _ in found]
    times = [[float(each) for each in row.split()] for _, row in found]
    made, axes = figure(height=2.1, width=4.6)
    left = [0.0] * len(ranks)
    for column, name, colour in ((FETCH, "fetch", ORANGE), (COMPUTE, "compute", BLUE)):
        widths = [row[column] for row in times]
        axes.barh(ranks, widths, left=left, height=0.7, color=colour, label=name)
        left = [a + b for a, b in zip(left, widths, strict=True)]
    waiting(axes, ranks, [row[WAIT] for row in times], left)
    axes.bar_label(axes.containers[-1], ["wait" if row[WAIT] else "" for row in times], label_type="center")
    axes.invert_yaxis()
    axes.set_xlabel("milliseconds of a step")
    axes.legend(frameon=False, fontsize=9, loc="lower center", bbox_to_anchor=(0.5, 1), ncols=2)
    save(made, __file__)


if __name__ == "__main__":
    main()
