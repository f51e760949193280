"""How many cases a test draws at random: all with ``PACELINE_THOROUGH=1``, as in the nightly job, else a third."""

from __future__ import annotations

import os

THOROUGH = bool(os.environ.get("PACELINE_THOROUGH"))
FEW = 5  # cases that remain of any number


def times(full: int) -> int:
    """The number of cases to draw of ``full``."""
    return full if THOROUGH else max(min(full, FEW), full // 3)
