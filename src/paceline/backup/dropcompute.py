"""``dropcompute``: updates wait for all workers, but pieces not begun by a threshold are dropped (Giladi et al.,
NeurIPS 2023, arXiv 2306.10598).

A task runs in pieces of equal size. A worker beyond the threshold tau at the end of a piece sends its gradient, so
that a piece that has begun counts, and each worker runs at least one. The gradient is divided by the samples that
really ran. So the batch varies, and the gradient is unbiased if being late is independent of the samples; if long
samples are slow, it contains fewer of them. Dropped samples go back to the epoch's order, so that each sample is
still used once an epoch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from paceline.backup.protocol import Backup, Iteration
from paceline.errors import number, whole
from paceline.rounds import Array

NEAR = 0.01  # part of the best speed-up by which a larger threshold's may be less, since it drops less


class TraceState(NamedTuple):
    """The traced updates. ends: seconds at which each piece of each worker was done, (n, pieces) for each update.
    tau: the threshold, seconds; infinite until it is found."""

    ends: tuple[Array, ...]
    tau: float


@dataclass(frozen=True)
class DropCompute(Backup[TraceState]):
    """Waits for all workers, and drops pieces that have not begun by a threshold.

    Args:
        workers: Number of workers, n.
        tau: The threshold, in seconds; 0 finds the one with the largest effective speed-up from the first updates, in
            which nothing is dropped.
        pieces: Pieces of a task, 2 or more.
        trace: First updates from which the threshold is found.
        exchange: Further seconds of each update, for summing the gradients.
    """

    workers: int
    tau: float = 0.0
    pieces: int = 8
    trace: int = 20
    exchange: float = 0.0

    def __post_init__(self) -> None:
        whole("dropcompute: pieces", self.pieces, 2)
        whole("dropcompute: trace", self.trace)
        number("dropcompute: tau", self.tau, "0 or more", lambda tau: tau >= 0)
        number("dropcompute: exchange", self.exchange, "0 or more", lambda part: part >= 0)

    def init(self) -> tuple[int, TraceState]:
        return self.workers, TraceState((), self.tau or np.inf)

    def step(self, state: TraceState, happened: Iteration) -> tuple[int, TraceState]:
        ends, quorum = happened.timings.ends, max(1, happened.present)
        whole = len(ends) == self.workers and ends.shape[1:] == (self.pieces,) and not np.isnan(ends).any()
        if np.isfinite(state.tau) or not whole:  # updates without some worker are not traced
            return quorum, state
        traced = (*state.ends, ends)
        if len(traced) < self.trace:
            return quorum, TraceState(traced, state.tau)
        return quorum, TraceState((), threshold(np.array(traced), self.exchange))

    def cut(self, state: TraceState) -> float:
        return state.tau


def threshold(ends: Array, exchange: float = 0.0) -> float:
    """The threshold in seconds: the largest of those whose effective speed-up is nearly the best (Alg. 2).

    ends: of each piece, (updates, n, pieces), NaN after the last of a worker with fewer. exchange: further seconds
    of each update.
    """
    taus = np.unique(ends[~np.isnan(ends)])
    taus = taus[np.linspace(0, len(taus) - 1, min(len(taus), 1000)).astype(int)]
    gains = np.array([speed_up(ends, tau, exchange) for tau in taus])
    return float(taus[np.flatnonzero(gains >= (1 - NEAR) * gains.max())[-1]])


def speed_up(ends: Array, tau: float, exchange: float = 0.0) -> float:
    """Pieces per second with this threshold over those without one: the paper's effective speed-up, except that a
    piece that is running at the threshold counts. Mean over the updates."""
    pieces = (~np.isnan(ends)).sum(-1)
    last = np.minimum((ends < tau).sum(-1), pieces - 1)
    took = np.take_along_axis(ends, last[..., None], -1)[..., 0].max(-1) + exchange
    done = (last + 1).sum(-1) / pieces.sum(-1)
    return float(np.mean(done * (np.nanmax(ends, axis=(-2, -1)) + exchange) / took))
