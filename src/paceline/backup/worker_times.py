"""How long k gradients take when workers differ: each worker's own recent round trips, played forward.

DBW's arrivals are exchangeable: whoever comes i-th. Where some workers are slow for good, or the cluster has
just changed, each worker's own times say more.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from paceline.backup.protocol import Timings
from paceline.rounds import Array

REPLICAS, SKIPPED, PLAYED = 6, 6, 12  # clusters played at once; iterations before counting, and counted


class TripsState(NamedTuple):
    """The last M round trips of each worker, newest last, NaN where there were fewer; shape (n, M)."""

    seconds: Array
    steps: int


def start(workers: int, memory: int) -> TripsState:
    """No trip yet. memory: M."""
    return TripsState(np.full((workers, memory), np.nan), 0)


def update(state: TripsState, timings: Timings) -> TripsState:
    """Add round trips."""
    seconds = state.seconds.copy()
    for worker, trip in zip(timings.worker, timings.trip, strict=True):
        if worker < len(seconds) and np.isfinite(trip):
            seconds[worker, :-1] = seconds[worker, 1:]
            seconds[worker, -1] = trip
    return TripsState(seconds, state.steps + 1)


def expected(state: TripsState, mode: str) -> Array:
    """Mean seconds of an iteration that waits for k = 1..n, shape (n,), each k used all the time.

    Late workers end what they do before they begin again ("push-wait", "pull"), or begin at once
    ("push-interrupt"). Draws repeat for the same number of steps, so that replicas agree.
    """
    n = len(state.seconds)
    known = ~np.isnan(state.seconds)
    if not known.any():
        return np.zeros(n)
    drawn = _draws(state, known)
    wanted = np.arange(n)[:, None]
    ready = np.zeros((n, REPLICAS, n))  # when each worker can begin: first axis k - 1
    now = np.zeros((n, REPLICAS))
    began = now
    for step in range(SKIPPED + PLAYED):
        if step == SKIPPED:
            began = now
        done = ready + drawn[step]
        now = np.take_along_axis(np.sort(done, axis=-1), wanted[:, :, None].repeat(REPLICAS, 1), -1)[..., 0]
        update_at = now[..., None]
        if mode == "push-interrupt":
            ready = np.broadcast_to(update_at, ready.shape)
        else:
            ready = np.where(done <= update_at, update_at, np.where(ready < update_at, done, ready))
    return (now - began).mean(-1) / PLAYED


def _draws(state: TripsState, known: np.ndarray) -> Array:
    """Round trips drawn from each worker's own, shape (steps, REPLICAS, n); from all for the unknown."""
    rng = np.random.default_rng(state.steps)
    pooled = state.seconds[known]
    columns = []
    for trips, mine in zip(state.seconds, known, strict=True):
        pool = trips[mine] if mine.any() else pooled
        columns.append(pool[rng.integers(len(pool), size=(SKIPPED + PLAYED, REPLICAS))])
    return np.stack(columns, -1)
