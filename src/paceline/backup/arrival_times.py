"""How long k gradients take: DBW's eq. (17), and two other ways to answer.

The i-th gradient of a version, when the version before had waited for h, is taken to arrive after T_{h,i}
seconds in the mean. T_{h,i} does not fall as i grows, does not rise as h grows, and T_{k,k} does not fall as k
grows: so few samples say much about all of them.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from paceline.backup import isotonic
from paceline.backup.protocol import Timings
from paceline.rounds import Array


class TimesState(NamedTuple):
    """Samples so far, first axis i (the place), second h; and the blocks of the last fit."""

    total: Array  # seconds, (n, n)
    samples: Array  # how many, (n, n)
    blocks: NDArray[np.int64]  # (n, n)


def start(workers: int) -> TimesState:
    """No sample yet."""
    nothing = np.zeros((workers, workers))
    return TimesState(nothing, nothing, np.zeros((workers, workers), np.int64))


def update(state: TimesState, timings: Timings, memory: float = 1.0) -> TimesState:
    """Add samples. memory: what the earlier ones count for from now on; 1 keeps them for good."""
    total, samples = state.total * memory, state.samples * memory
    n = len(total)
    fits = (timings.place >= 1) & (timings.place <= n) & (timings.before >= 1) & (timings.before <= n)
    at = (timings.place[fits] - 1, timings.before[fits] - 1)
    np.add.at(total, at, timings.seconds[fits])
    np.add.at(samples, at, 1.0)
    return state._replace(total=total, samples=samples)


def constrained(state: TimesState) -> tuple[Array, TimesState]:
    """Seconds for k = 1..n gradients if one always waits for k, shape (n,): the optimum of eq. (17).

    Where no sample says anything, the least that the order allows (0 before the first sample): optimistic, so
    that such k are tried.
    """
    known = state.samples > 0
    if not known.any():
        return np.zeros(len(state.samples)), state
    means = np.divide(state.total, state.samples, out=np.zeros_like(state.total), where=known)
    start_from = state.blocks if state.blocks.any() else None
    values, blocks = isotonic.fit(means, state.samples, start_from)
    return np.diagonal(isotonic.lower_bounds(values, known)).copy(), state._replace(blocks=blocks)


def naive(state: TimesState) -> Array:
    """The plain means of the samples of T_{k,k}, shape (n,); NaN where there is none."""
    with np.errstate(invalid="ignore"):
        return np.diagonal(state.total) / np.diagonal(state.samples)
