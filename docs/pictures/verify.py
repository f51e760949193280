"""Draws verify.svg from the examples of docs/verify.md: how far gradients may differ, and how far two ports do.

python docs/pictures/verify.py
"""

from __future__ import annotations

import re

from common import BLUE, FOLDER, GREY, ORANGE, figure, save


def main() -> None:
    page = (FOLDER.parent / "verify.md").read_text(encoding="utf-8")
    exact, wrong, tolerance = (
        float(re.findall(pattern, page)[0])
        for pattern in (r"exact to (\S+) over", r"from step \d+, (\S+) in", r"by default (\S+) in float32")
    )
    made, axes = figure(height=1.8, width=4.6)
    axes.set_xscale("log")
    axes.set_xlim(1e-9, 10)
    for place, (value, colour, shape, label) in enumerate(
        ((exact, BLUE, "D", "exact port"), (wrong, ORANGE, "s", "port with an error"))
    ):
        axes.plot([value], [place], shape, color=colour, markersize=7)
        axes.text(value, place - 0.25, f"{label}: {value:g}", ha="center", fontsize=9)
    axes.axvline(tolerance, color=GREY, linestyle=":", zorder=0)
    axes.set_ylim(1.6, -0.9)
    axes.set_yticks([])
    axes.spines.left.set_visible(False)
    axes.set_xlabel("relative difference of gradients (dotted: tolerance in float32)", fontsize=9)
    save(made, __file__)


if __name__ == "__main__":
    main()
