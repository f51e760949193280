"""Draws samples.svg: one round of texts of unlike lengths, divided by count, by cost, and by cost and speed.

python docs/pictures/samples.py
"""

from __future__ import annotations

import numpy as np
from common import BLUE, ORANGE, figure, save, waiting

from paceline.samples import SampleCosts, deal

RANKS, BATCH, SLOW = 8, 64, 4.0


def main() -> None:
    lengths = np.clip(np.rint(np.random.default_rng(3).lognormal(5, 1, BATCH)), 16, 1024)
    model = SampleCosts.checked(lengths, BATCH).with_alpha(0.001)
    costs, pace = model.of(lengths), np.r_[np.ones(RANKS - 1), SLOW]
    by_count = [np.arange(BATCH // RANKS) + rank * (BATCH // RANKS) for rank in range(RANKS)]
    equal, dealt = deal(lengths, model, np.ones(RANKS)), deal(lengths, model, pace)
    ways = {
        "by count": by_count,
        "by cost, on ranks taken as equal": [equal.of(rank) for rank in range(RANKS)],
        "by cost and speed": [dealt.of(rank) for rank in range(RANKS)],
    }
    made, axes = figure(3, width=10, height=2.9, sharex=True, sharey=True)
    for each, (title, ranks) in zip(axes, ways.items(), strict=True):
        ends = []
        for rank, mine in enumerate(ranks):
            start = 0.0
            for cost in sorted(costs[mine] * pace[rank], reverse=True):
                colour = ORANGE if rank == RANKS - 1 else BLUE
                each.barh(rank, cost, left=start, height=0.8, color=colour, edgecolor="white", linewidth=0.6)
                start += cost
            ends.append(start)
        for rank, end in enumerate(ends):
            waiting(each, rank, max(ends) - end, end, 0.8)
        each.set_title(f"{title}: {max(ends):.0f} s", loc="left", fontsize=10)
        each.set(xlabel="seconds" if each is axes[1] else "")
    axes[0].set(ylabel="rank", yticks=range(RANKS))
    axes[0].invert_yaxis()
    save(made, __file__)


if __name__ == "__main__":
    main()
