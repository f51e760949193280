"""Limits, shares and the slowest worker if some workers are absent.

A worker that was absent from the last round gets nothing in the next; the policies keep what they know of it,
so that it gets its part again as soon as it is back. (A worker that is present and has nothing to do reports its
seconds, 0 or its overhead; only one that reports nothing is absent.)
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from paceline.costs import RESOLUTION, line_through
from paceline.rounds import Array, Cluster, Round
from paceline.shares import proportional

__all__ = [
    "among_present",
    "bounds",
    "carried",
    "even",
    "fill_unknown",
    "measured_slopes",
    "remembered",
    "slowest",
]

NOTICED = 1e-3  # of an equal load: with less, a load that takes no time beyond the overhead says nothing


def bounds(cluster: Cluster, present: NDArray[np.bool_]) -> tuple[Array, Array]:
    """The limits of each worker's share if only some are present.

    Absent workers get nothing except what the present ones cannot hold.

    Args:
        cluster: The workers and their limits.
        present: Which workers take part, booleans of shape (..., n).

    Returns:
        Least and most shares, each of shape (n,) or (..., n).
    """
    least, most = cluster.least_shares, cluster.most_shares
    if present.all():
        return least, most
    room = np.where(present, most, 0.0)
    spill = np.maximum(1.0 - room.sum(-1, keepdims=True), 0.0)
    idle = np.where(present, 0.0, most)
    idle *= spill / np.maximum(idle.sum(-1, keepdims=True), spill + (spill == 0))
    least = np.where(present, least, 0.0)
    return least, room + idle


def among_present(cluster: Cluster, present: NDArray[np.bool_], weights: Array) -> Array:
    """Shares in proportion to the weights, within the limits of those present.

    Args:
        cluster: The workers and their limits.
        present: Which workers take part, booleans of shape (..., n).
        weights: Numbers of 0 or more, shape (..., n).

    Returns:
        Shares that sum to 1, shape (..., n).
    """
    least, most = bounds(cluster, present)
    return proportional(weights, least, most)


def carried(cluster: Cluster, present: NDArray[np.bool_], shares: Array) -> Array:
    """The shares so far, without the absent workers.

    Args:
        cluster: The workers and their limits.
        present: Which workers take part, booleans of shape (..., n).
        shares: The shares so far, shape (..., n).

    Returns:
        ``shares`` to the last bit in each realization in which all are present; elsewhere as ``among_present``. Shape
        (..., n).
    """
    if (everybody := present.all(-1, keepdims=True)).all():
        return shares
    return np.where(everybody, shares, among_present(cluster, present, shares))


def even(cluster: Cluster) -> Array:
    """The equal division within the limits.

    Args:
        cluster: The workers and their limits.

    Returns:
        Shares of shape (*realizations, n).
    """
    shares = proportional(np.ones(cluster.workers), cluster.least_shares, cluster.most_shares)
    return np.array(np.broadcast_to(shares, cluster.shape))


def fill_unknown(seconds_per_sample: Array) -> Array:
    """Replace the paces of workers that were never measured by the mean of the others.

    Args:
        seconds_per_sample: Shape (..., n), NaN where unknown.

    Returns:
        Shape (..., n), without NaN; 1 for all if none was measured.
    """
    unknown = np.isnan(seconds_per_sample)
    if not unknown.any():
        return seconds_per_sample
    known = np.where(unknown, 0.0, seconds_per_sample)
    mean = known.sum(-1, keepdims=True) / np.maximum((~unknown).sum(-1, keepdims=True), 1)
    return np.where(unknown, np.where(mean > 0, mean, 1.0), seconds_per_sample)


def measured_slopes(round: Round, before: Array) -> Array:
    """Seconds per sample of each worker, as a round shows them.

    Args:
        round: A finished round.
        before: What to return for workers of which it shows nothing, shape (..., n).

    Returns:
        Shape (..., n); 0 for a worker whose load took its overhead and nothing beyond, as its cost is flat.
    """
    loads, beyond = round.loads, round.seconds - round.overhead
    slopes = line_through(loads, round.seconds, round.overhead, before)
    flat = np.abs(beyond) <= RESOLUTION * round.seconds
    if flat.any():
        flat &= loads >= NOTICED * round.batch / loads.shape[-1]
        slopes = np.where(flat, 0.0, slopes)
    return slopes


def remembered(present: NDArray[np.bool_], shares: Array, before: Array) -> Array:
    """The shares to keep in a state, so that absent workers find their own unchanged when they are back.

    Args:
        present: Which workers take part, booleans of shape (..., n).
        shares: The new plan, shape (..., n).
        before: The shares in the state so far, shape (..., n).

    Returns:
        ``before`` for the absent; the others' new shares, scaled to the sum that they had before.
    """
    if (everybody := present.all(-1, keepdims=True)).all():
        return shares
    part = np.where(present, before, 0.0).sum(-1, keepdims=True)
    return np.where(present, shares * np.where(everybody, 1.0, part), before)


def slowest(seconds: Array) -> NDArray[np.int64]:
    """The rank with the largest seconds, (..., 1); the lowest of equals, so that replicas agree; NaN is skipped."""
    straggler = np.argmax(seconds, axis=-1, keepdims=True)
    if np.isnan(np.take_along_axis(seconds, straggler, -1)).any():  # argmax stops at a NaN
        straggler = np.argmax(np.where(np.isnan(seconds), -np.inf, seconds), axis=-1, keepdims=True)
    return straggler
