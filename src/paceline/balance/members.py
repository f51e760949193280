"""Limits and shares if some workers are absent.

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

__all__ = ["among_present", "bounds", "carried", "even", "fill_unknown", "measured_slopes", "remembered"]

NOTICED = 1e-3  # of an equal load: with less, a load that takes no time beyond the overhead says nothing


def bounds(cluster: Cluster, present: NDArray[np.bool_]) -> tuple[Array, Array]:
    """Least and most share of each worker, shape (n,) or (..., n), if only some are present.

    Absent workers get nothing except what the present ones cannot hold.

    Args:
        cluster: The workers and their limits.
        present: Which workers take part, booleans of shape (..., n).
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
    """Shares in proportion to the weights, shape (..., n), within the limits of those present.

    Args:
        cluster: The workers and their limits.
        present: Which workers take part, booleans of shape (..., n).
        weights: Numbers of 0 or more, shape (..., n).
    """
    least, most = bounds(cluster, present)
    return proportional(weights, least, most)


def carried(cluster: Cluster, present: NDArray[np.bool_], shares: Array) -> Array:
    """Like ``among_present``, but the shares stay to the last bit in each realization in which all are present.

    Args:
        cluster: The workers and their limits.
        present: Which workers take part, booleans of shape (..., n).
        shares: The shares so far, shape (..., n).
    """
    if (everybody := present.all(-1, keepdims=True)).all():
        return shares
    return np.where(everybody, shares, among_present(cluster, present, shares))


def even(cluster: Cluster) -> Array:
    """The equal division within the limits, shape (*realizations, n).

    Args:
        cluster: The workers and their limits.
    """
    shares = proportional(np.ones(cluster.workers), cluster.least_shares, cluster.most_shares)
    return np.array(np.broadcast_to(shares, cluster.shape))


def fill_unknown(seconds_per_sample: Array) -> Array:
    """The seconds per sample, with the mean of the others for workers that were never measured (NaN).

    Args:
        seconds_per_sample: Shape (..., n), NaN where unknown.
    """
    unknown = np.isnan(seconds_per_sample)
    if not unknown.any():
        return seconds_per_sample
    known = np.where(unknown, 0.0, seconds_per_sample)
    mean = known.sum(-1, keepdims=True) / np.maximum((~unknown).sum(-1, keepdims=True), 1)
    return np.where(unknown, np.where(mean > 0, mean, 1.0), seconds_per_sample)


def measured_slopes(round: Round, before: Array) -> Array:
    """Seconds per sample of each worker as the round shows them, (..., n); as before if it does not show them.

    0 for a worker whose load took its overhead and nothing beyond: its cost is flat.
    """
    loads, beyond = round.loads, round.seconds - round.overhead
    slopes = line_through(loads, round.seconds, round.overhead, before)
    flat = np.abs(beyond) <= RESOLUTION * round.seconds
    if flat.any():
        flat &= loads >= NOTICED * round.batch / loads.shape[-1]
        slopes = np.where(flat, 0.0, slopes)
    return slopes


def remembered(present: NDArray[np.bool_], shares: Array, before: Array) -> Array:
    """The shares to keep in a state: new shares of the present workers, scaled to the sum that they had before.

    So absent workers find their own shares unchanged when they are back.
    """
    if (everybody := present.all(-1, keepdims=True)).all():
        return shares
    part = np.where(present, before, 0.0).sum(-1, keepdims=True)
    return np.where(present, shares * np.where(everybody, 1.0, part), before)
