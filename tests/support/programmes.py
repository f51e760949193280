"""Divisions by a general solver: an independent answer where Paceline has a rule of its own."""

from __future__ import annotations

from typing import Any

import numpy as np
from scipy.optimize import linprog


def soonest(slopes: Any, overheads: Any, batch: float, low: Any = 0.0, high: Any = None) -> tuple[Any, float]:
    """Loads within the limits that sum to the batch, and the least T so that slope x + overhead <= T for all."""
    n = len(slopes)
    limits = zip(np.broadcast_to(low, n), np.broadcast_to(high, n), strict=True)
    above = np.hstack([np.diag(slopes), -np.ones((n, 1))])
    goal, whole = np.append(np.zeros(n), 1.0), [np.append(np.ones(n), 0.0)]
    found = linprog(goal, above, -np.asarray(overheads), whole, [batch], bounds=[*limits, (None, None)])
    return found.x[:n], float(found.fun)
