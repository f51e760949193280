"""``dropcompute``: all are waited for, but what they have not begun by a threshold is dropped (Giladi et al.,
NeurIPS 2023, arXiv 2306.10598).

A task is run in pieces of equal size. Whoever is over the threshold tau at the end of a piece sends what it has, so
that a piece that has begun counts, and everybody runs one at least. The gradient is divided by the samples that
really ran. So the batch varies, and the gradient is unbiased if being late has nothing to do with the samples; if
long samples are slow, it has less of them. What is dropped goes back to the epoch's order, from which each sample is
still used once an epoch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from paceline.backup.protocol import Backup, Iteration
from paceline.errors import number, whole
from paceline.rounds import Array

NEAR = 0.01  # thresholds whose speed-up is within it of the best are as good: that which drops least is taken


class TraceState(NamedTuple):
    """ends: seconds after which each piece of each worker was done, one (n, pieces) an update. tau: seconds."""

    ends: tuple[Array, ...]
    tau: float


@dataclass(frozen=True)
class DropCompute(Backup[TraceState]):
    """Waits for everybody, and drops what has not begun by a threshold.

    tau: the threshold, seconds; 0 finds the one with the largest effective speed-up from the first updates, in which
        nothing is dropped.
    pieces: of a task. trace: how many updates these are. exchange: further seconds of each update, as of its sums.
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
        if np.isfinite(state.tau) or not whole:  # rounds in which somebody was away tell less
            return quorum, state
        traced = (*state.ends, ends)
        if len(traced) < self.trace:
            return quorum, TraceState(traced, state.tau)
        return quorum, TraceState((), threshold(np.array(traced), self.exchange))

    def cut(self, state: TraceState) -> float:
        return state.tau


def threshold(ends: Array, exchange: float = 0.0) -> float:
    """The seconds at which to drop what has not begun: the largest of those whose effective speed-up is best
    (Alg. 2).

    ends: of each piece, (updates, n, pieces), NaN behind the last of a worker with fewer. exchange: further seconds
    of each update.
    """
    taus = np.unique(ends[~np.isnan(ends)])
    taus = taus[np.linspace(0, len(taus) - 1, min(len(taus), 1000)).astype(int)]
    gains = np.array([speed_up(ends, tau, exchange) for tau in taus])
    return float(taus[np.flatnonzero(gains >= (1 - NEAR) * gains.max())[-1]])


def speed_up(ends: Array, tau: float, exchange: float = 0.0) -> float:
    """Pieces done per second with this threshold over those without any: the paper's effective speed-up, but that a
    piece which is running at the threshold counts. Mean over the updates."""
    pieces = (~np.isnan(ends)).sum(-1)
    last = np.minimum((ends < tau).sum(-1), pieces - 1)
    took = np.take_along_axis(ends, last[..., None], -1)[..., 0].max(-1) + exchange
    done = (last + 1).sum(-1) / pieces.sum(-1)
    return float(np.mean(done * (np.nanmax(ends, axis=(-2, -1)) + exchange) / took))
