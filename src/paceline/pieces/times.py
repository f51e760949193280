"""What the seconds of a round's pieces tell: what each piece costs beyond its samples, and how far claims strayed."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

COST_STEP = 1.1  # factor by which that follows each round's measurement: a running median


def piece_cost(sizes: Sequence[float], seconds: Sequence[float], before: float) -> float:
    """Seconds of a piece beyond its samples, after a round's pieces: from the largest and the smallest.

    One round's is noisy, so the estimate only takes a step towards it.
    """
    if len(sizes) < 2:
        return before
    large, small = int(np.argmax(sizes)), int(np.argmin(sizes))
    if sizes[large] < 2 * sizes[small]:
        return before
    found = (seconds[small] * sizes[large] - seconds[large] * sizes[small]) / (sizes[large] - sizes[small])
    return float(np.clip(before * COST_STEP if found > before else before / COST_STEP, 5e-5, 1.0))


def against_the_first(sizes: Sequence[float], seconds: Sequence[float], cost: float) -> tuple[float, float]:
    """(seconds that a worker's claims would have taken at the pace of its first piece, how far from it they were).

    The last piece is left out: it may have waited for others.
    """
    if len(sizes) < 3:
        return 0.0, 0.0
    expected = max(seconds[0] - cost, 0.0) / sizes[0] * sum(sizes[1:-1])
    return expected, abs(sum(seconds[1:-1]) - cost * (len(sizes) - 2) - expected) if expected else 0.0
