"""Problems of coded computation for tests."""

from __future__ import annotations

from typing import Any

import numpy as np

from paceline.coded import Problem, ShiftedExponential


def problem_of(u: Any, a: Any = None, rows: Any = 1000.0, latency: Any = None) -> Problem:
    """Masters m0, m1, ... and workers w0, w1, ... with shifted exponential times, a = 1 / u if it is not given."""
    u = np.asarray(u, float)
    masters, workers = (tuple(f"{kind}{i}" for i in range(n)) for kind, n in zip("mw", u.shape, strict=True))
    delay = ShiftedExponential(u, 1 / u if a is None else np.asarray(a, float))
    return Problem(masters, workers, np.full(len(u), rows), delay, latency)
