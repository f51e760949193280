"""What rounds in pieces lost beside what replaying them tells: ends that are uneven all the same.

A replay takes it that all that is claimed is shared out perfectly. It is not where workers are held up rather than
slow, as by others on the same processors: no claim can know of that, and the last pieces suffer it as a whole plan
would. So what rounds in pieces really came to is compared with what the replay says of these very rounds.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from paceline.rounds import Array

MEMORY = 0.98  # weight of what was learned, kept each round, whether it was in pieces or not
BELIEVED = 1.0  # weight of rounds in pieces from which on a half of what they lost is believed


def missed(at_once: Array, planned: Array, ran: Array, promised: Array) -> Array:
    """Of a round in pieces: by how much later than was promised the slowest worker ended, over the ideal time.

    at_once: portion of the plan that was run before anything was claimed. planned: when the slowest worker would have
    ended with its whole plan; ran: when it did, without what its pieces cost; promised: how late pieces may end, that
    is the time of the smallest. All over the ideal time, (..., 1).
    """
    return np.maximum(ran - np.maximum(at_once * planned, 1.0) - promised, 0.0)


def learn(ends: Array, weight: Array, missed: Array, counts: NDArray[np.bool_]) -> tuple[Array, Array]:
    """(mean of what rounds in pieces have ``missed``, the weight behind it) after one more round; all (..., 1).

    counts: whether it was in pieces; else what is known of such rounds fades.
    """
    weight = MEMORY * weight + np.where(counts, 1.0, 0.0)
    gain = np.where(counts, 1.0 / np.maximum(weight, 1.0), 0.0)
    return ends + gain * (np.where(counts, missed, 0.0) - ends), weight


def expected(ends: Array, weight: Array) -> Array:
    """What the next round in pieces is to miss; of the arrays' shape."""
    return ends * (weight / (weight + BELIEVED))
