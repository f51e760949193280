"""What counts as waiting: the one definition that the record, reports, forecasts and the doctor go by.

A worker waits from the end of its own work until the last worker of the round has ended its work. What comes after
that (the exchange of gradients, the optimizer's step, logging) is nobody's waiting: it takes all workers alike, and
no division of the batch shortens it.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from paceline.costs import Array


def waits(seconds: Any, compute: Any) -> Array:
    """Seconds that each worker waited for the last one, shape (..., n); NaN where it was absent.

    seconds: of each round, shape (...). compute: seconds of each worker's own work, shape (..., n), NaN where it
    was absent. A round that went on without its last worker ended for the others when the round did.
    """
    compute = np.asarray(compute, np.float64)
    if compute.shape[-1] == 0:
        return compute
    latest = np.where(np.isnan(compute), -np.inf, compute).max(axis=-1)
    ended = np.minimum(latest, np.asarray(seconds, np.float64))
    return np.where(np.isnan(compute), np.nan, np.maximum(ended[..., None] - compute, 0.0))


def waiting_share(seconds: Any, compute: Any) -> float | None:
    """Portion of the workers' time that went into waiting, rounds and workers summed; None where none was spent.

    The time of a worker is that of all rounds in which it was there. Shapes as in ``waits``.
    """
    there = ~np.isnan(np.asarray(compute, np.float64))
    paid = float((np.asarray(seconds, np.float64)[..., None] * there).sum())
    return float(np.nansum(waits(seconds, compute))) / paid if paid > 0 else None
