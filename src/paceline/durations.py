"""Which numbers are taken for seconds: what a clock can tell, and what somebody could wait for.

Beyond these a float still holds a number, but sums and quotients of such numbers overflow to infinities, and
every figure made from them would be wrong without a word. So they are refused where they enter.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

LEAST, MOST = 1e-12, 1e9  # seconds; the larger one is 30 years
SPAN = "1e-12 to 1e9"  # in words, for durations that must be more than 0
SPAN_0 = "0 to 1e9"  # for those that may be 0
# Seconds per sample are cut to these, so that a worker that reported 0 seconds is not infinitely fast.
QUICKEST, LONGEST = 1e-15, 1e15


def outside(seconds: Any, least: float = LEAST) -> NDArray[np.bool_]:
    """Where numbers are no such seconds; NaN is one of them. least: 0 for durations that may be nothing."""
    values = np.asarray(seconds, float)
    wrong: NDArray[np.bool_] = ~((values >= least) & (values <= MOST))
    return wrong
