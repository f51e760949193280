"""What portion of a plan to run at once, learned by replaying each round: what would each portion have lost?"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from paceline.durations import LONGEST, QUICKEST
from paceline.forecast.portable_math import log
from paceline.rounds import Array

PORTIONS = np.concatenate([np.arange(0.05, 0.96, 0.05), [1.0]])  # candidates for what is run at once
LEFT = 1 - PORTIONS
MEMORY = 0.98  # weight of what was learned, kept each round
FIRST = 0.1  # weight of each of the first rounds, which also warm the workers up, and of the plans made from these
WARM = 0.45  # weight from which on rounds count in full: after five
LEAST = 3.0  # the smallest piece takes this many times what a piece costs beyond its samples


def learn(
    losses: Array, weight: Array, ratios: Array, counts: NDArray[np.bool_], doubt: Array
) -> tuple[Array, Array]:
    """(what each portion has lost so far, (..., K), the weight behind it, (..., 1)) after one more round.

    Had a portion been run at once and the rest shared out perfectly, the slowest worker would have ended portion *
    slowest / ideal after the round began, the others at 1 or later. ratios, counts: of ``slowest_over_ideal``, for
    the shares that were planned. doubt: what of the whole plan's loss may come of the pieces that the round was run
    in, so that the plan would not have had it, (..., 1): once whole rounds are run, they tell.
    """
    lost = np.maximum(PORTIONS * ratios - 1.0, 0.0)
    lost[..., -1:] = np.maximum(lost[..., -1:] - doubt, 0.0)
    own = np.where(weight < WARM, FIRST, 1.0)
    weight = np.where(counts, MEMORY * weight + own, weight)
    gain = np.where(counts, own / np.maximum(weight, FIRST), 0.0)
    return losses + gain * (lost - losses), weight


def best(
    losses: Array, ends: Array, piece: Array, seconds: Array, part: float, then: Array, whole: bool
) -> Array:
    """The portion with the least loss, the cost of the pieces added; (...,).

    losses: as learned, (..., K). ends: what pieces lose beside that, of the round's seconds. piece: seconds that one
    costs beyond its samples; seconds: that the round will take; these three (..., 1). part, then: what a claim is of
    what is due, before and once the speeds are known. whole: all at once is a choice, too.
    """
    smallest = np.maximum(LEAST * piece, QUICKEST)
    after_one_claim = (1 - part) * LEFT * seconds
    later = np.maximum(np.minimum(after_one_claim, LONGEST), smallest)
    stages = log(later / smallest) / -log(1 - np.minimum(then, 0.99))[..., None]
    lost = losses + ends + ((2 + stages) * piece + smallest / 2) / seconds
    lost[..., -1] = losses[..., -1] if whole else np.inf
    return np.asarray(PORTIONS[np.argmin(lost, axis=-1)])


def slowest_over_ideal(shares: Array, speeds: Array, pace: Array) -> tuple[Array, NDArray[np.bool_]]:
    """(when the slowest worker ends with these shares, over the time at which all would at best, whether that is
    known); both (..., 1).

    speeds: by which the round was planned, 0 where nothing was known; pace: seconds a sample, as measured, NaN where
    it was not; both (..., n).
    """
    known = np.isfinite(pace) & (speeds > 0)  # measured, and planned for by what was measured before
    speed = np.where(known, 1.0 / np.where(known, pace, 1.0), 0.0)
    shares = np.where(known, shares, 0.0)
    together = shares.sum(-1, keepdims=True)
    slowest = np.where(known, shares * np.where(known, pace, 0.0), 0.0).max(-1, keepdims=True)
    ratios = slowest * speed.sum(-1, keepdims=True) / np.where(together > 0, together, 1.0)
    return ratios, together > 0
