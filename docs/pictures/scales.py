"""Draws scales.svg from the table of docs/figures.md: shares of the bound by the number of ranks.

python docs/pictures/scales.py
"""

from __future__ import annotations

import numpy as np
from common import STYLES, figure, save, table, value

COLUMNS = {"split by hand": 1, "level": 2, "auto": 3}


def main() -> None:
    made, (real, virtual) = figure(height=5.6, width=4.6, rows=2)
    _, rows = table("How does it scale?")
    for axes, kind in ((real, "real processes"), (virtual, "virtual clock")):
        chosen = [row for row in rows if row[0].endswith(kind)]
        ranks = [value(row[0].split(", ")[0]) for row in chosen]
        for name, column in COLUMNS.items():
            colour, shape = STYLES[name]
            shares = np.array([value(row[column]) for row in chosen])
            if np.isfinite(shares).any():
                axes.plot(ranks, shares, f"{shape}-", color=colour, label=name)
        axes.set_xscale("log", base=2 if axes is real else 10)
        axes.set_xticks(ranks, [f"{each:,.0f}" for each in ranks])
        axes.minorticks_off()
        axes.set(ylim=(0, 100), xlabel="ranks", ylabel="share of the bound, %")
        axes.set_title(kind, loc="left", fontsize=10)
        axes.legend(frameon=False, fontsize=8)
    save(made, __file__)


if __name__ == "__main__":
    main()
