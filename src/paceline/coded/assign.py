"""Which worker serves which master: problem P5 of Sun et al. (2019), max over k of min over m of sum_n k v.

Every function takes values v of shape (M, N), the portion of master m's rows that worker n can be expected to
bring in a unit of time (eq. 8), and returns k of shape (M, N): 0 or 1 for dedicated workers, probabilities
for ``exact.probabilistic``. A column sums to at most 1. Ties go to the lowest index.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from paceline.coded.delay import Array


def dedicated(owner: NDArray[np.intp], masters: int) -> Array:
    """k from the master of each worker, shape (N,) of whole numbers."""
    k = np.zeros((masters, len(owner)))
    k[owner, np.arange(len(owner))] = 1.0
    return k


def uniform(values: Array) -> Array:
    """Workers in equal, consecutive groups, the first masters taking one more where N / M is not whole."""
    masters, workers = values.shape
    counts = [len(part) for part in np.array_split(np.arange(workers), masters)]
    return dedicated(np.repeat(np.arange(masters), counts), masters)


def simple(values: Array) -> Array:
    """Algorithm 2: a worker for each master, best pair first; then the master that has least picks its best
    worker.
    """
    masters, workers = values.shape
    owner = np.full(workers, -1)
    left = values.astype(float).copy()
    sums = np.zeros(masters)
    waiting = left.copy()
    for _ in range(masters):
        m, n = (int(i) for i in np.unravel_index(np.argmax(waiting), waiting.shape))
        owner[n], sums[m] = m, values[m, n]
        waiting[m], waiting[:, n], left[:, n] = -np.inf, -np.inf, -np.inf
    for _ in range(workers - masters):
        m = int(np.argmin(sums))
        n = int(np.argmax(left[m]))
        owner[n] = m
        sums[m] += values[m, n]
        left[:, n] = -np.inf
    return dedicated(owner, masters)
