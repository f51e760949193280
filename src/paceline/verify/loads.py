"""The loads of each run: equal, different by up to 1 to 4, with a rank that has nothing to do, or all on one rank."""

from __future__ import annotations

import numpy as np

from paceline.errors import PacelineError
from paceline.rounds import Plan
from paceline.shares import whole_samples

EQUAL, UNEVEN, IDLE, ONE = "equal", "uneven", "idle", "one rank"
UNLIKE = (1.0, 2.0, 4.0)  # shares of successive ranks under uneven loads


def divided(kind: str, batch: int, least: list[int], most: list[int], unit: int = 1) -> list[int] | None:
    """The samples of each rank; None if the limits leave no room for this kind of loads.

    least, most: samples of each rank, as its limits say. unit: loads are multiples of this many samples. An idle rank
    has no samples whatever ``least`` says: short rounds leave such ranks. With all samples on one rank, the program
    does what one process does. Limits that fix all loads do not count, since nothing could be compared.
    """
    ranks = len(most)
    if least == most:
        least, most = [0] * ranks, [batch] * ranks
    shares = np.ones(ranks)
    low, high = np.array(least, float), np.array(most, float)
    if kind == UNEVEN:
        shares = np.resize(UNLIKE, ranks)
    elif kind == IDLE:
        shares[0] = low[0] = high[0] = 0.0
    elif kind == ONE:
        shares[1:] = low[1:] = high[1:] = 0.0
    if high.sum() < batch:
        return None
    found: list[int] = whole_samples(Plan(shares / shares.sum()), batch, low, high, unit).tolist()
    return found


def parsed(text: str) -> list[list[int]]:
    """Loads from the command line, as 8/16/48,0/36/36. Raises PacelineError if they are something else."""
    try:
        found = [[int(load) for load in run.split("/")] for run in text.split(",")]
    except ValueError:
        found = []
    sums = {(len(run), sum(run)) for run in found}
    if len(sums) != 1 or min(map(min, found)) < 0 or len(found[0]) < 2:
        raise PacelineError(
            f"--loads {text}: expected samples of each rank for one or more runs with the same sum, such as "
            "8/16/48,0/36/36"
        )
    return found
