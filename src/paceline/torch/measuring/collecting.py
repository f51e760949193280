"""Python's garbage collections in the same rounds on all ranks: one pause that all take together, instead of one that
each takes when its own count is full, while the others wait for it.
"""

from __future__ import annotations

import gc
import math
import time

from paceline.torch.measuring.open_rounds import RoundResult


class Collecting:
    """Turns automatic collection off, and collects after every so manyth round, until ``close``."""

    def __init__(self, every: int) -> None:
        self._every, self._automatic = every, gc.isenabled()
        self._collected = -math.inf
        gc.collect()
        gc.disable()

    def round(self, result: RoundResult) -> None:
        """A round is over on every rank, and the next has not begun."""
        if (result.step + 1) % self._every == 0 and not result.ended < self._collected:
            gc.collect()
            self._collected = time.perf_counter()  # once for short rounds that are told of together

    def close(self) -> None:
        """Collect by count again, where that was so before. Safe to call twice."""
        if self._automatic:
            gc.enable()
