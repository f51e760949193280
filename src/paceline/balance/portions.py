"""What portion of a plan to run at once, learned by replaying each round: what would each portion have lost?"""

from __future__ import annotations

import math

import numpy as np

from paceline.durations import LONGEST, QUICKEST
from paceline.few import ODD, Numbers, few, log, total
from paceline.rounds import Array

PORTIONS = np.concatenate([np.arange(0.05, 0.96, 0.05), [1.0]])  # candidates for what is run at once
LEFT = 1 - PORTIONS
MEMORY = 0.98  # weight of what was learned, kept each round
LEAST = 3.0  # the smallest piece takes this many times what a piece costs beyond its samples


def learn(losses: Array, weight: Array, planned: Array, speeds: Array, pace: Array) -> tuple[Array, Array]:
    """(what each portion has lost so far, (..., K), the weight behind it, (..., 1)) after one more round.

    Had a portion been run at once and the rest shared out perfectly, the slowest worker would have ended portion *
    slowest / ideal after the round began, the others at 1 or later. planned: shares; speeds: by which they were
    planned, 0 where nothing was known; pace: seconds a sample, as measured, NaN where it was not; all (..., n).
    """
    if few(pace) and (found := learn_few(losses, weight, planned, speeds, pace.tolist())) is not None:
        return found
    known = np.isfinite(pace) & (speeds > 0)  # measured, and planned for by what was measured before
    speed = np.where(known, 1.0 / np.where(known, pace, 1.0), 0.0)
    planned = np.where(known, planned, 0.0)
    together = planned.sum(-1, keepdims=True)
    counts = together > 0
    slowest = np.where(known, planned * np.where(known, pace, 0.0), 0.0).max(-1, keepdims=True)
    ratios = slowest * speed.sum(-1, keepdims=True) / np.where(together > 0, together, 1.0)
    lost = np.maximum(PORTIONS * ratios - 1.0, 0.0)
    weight = np.where(counts, MEMORY * weight + 1.0, weight)
    gain = np.where(counts, 1.0 / np.maximum(weight, 1.0), 0.0)
    return losses + gain * (lost - losses), weight


def learn_few(
    losses: Array, weight: Array, planned: Array, speeds: Array, paces: Numbers
) -> tuple[Array, Array] | None:
    """``learn`` in plain numbers, where all were measured, now and before; None where that is not so."""
    if (ratio := _ratio_of_few(planned.tolist(), speeds.tolist(), paces)) is None:
        return None
    behind = MEMORY * float(weight[0]) + 1.0
    lost = np.maximum(PORTIONS * ratio - 1.0, 0.0)
    lost -= losses
    lost *= 1.0 / max(behind, 1.0)
    lost += losses
    return lost, np.array([behind])


def best(losses: Array, piece: Array, seconds: Array, part: float, then: Array, whole: bool) -> Array:
    """The portion with the least loss, the cost of the pieces added; (...,).

    losses: as learned, (..., K). piece: seconds that one costs beyond its samples; seconds: that the round will
    take; both (..., 1). part, then: what a claim is of what is due, before and once the speeds are known. whole: all
    at once is a choice, too.
    """
    if whole and few(losses) and then > 0 and whole_is_best(losses, float(piece[0]), float(seconds[0])):
        return np.asarray(PORTIONS[-1])
    smallest = np.maximum(LEAST * piece, QUICKEST)
    after_one_claim = (1 - part) * LEFT * seconds
    later = np.maximum(np.minimum(after_one_claim, LONGEST), smallest)
    stages = log(later / smallest) / -log(1 - np.minimum(then, 0.99))[..., None]
    lost = losses + ((2 + stages) * piece + smallest / 2) / seconds
    lost[..., -1] = losses[..., -1] if whole else np.inf
    return np.asarray(PORTIONS[np.argmin(lost, axis=-1)])


def whole_is_best(losses: Array, piece: float, seconds: float) -> bool:
    """Whether all at once has certainly lost least, one run's: less than what pieces cost whatever the portion."""
    cost = (2.0 * piece + max(LEAST * piece, QUICKEST) / 2.0) / seconds
    return bool(losses[-1] < cost and losses.min() >= 0)


def _ratio_of_few(shares: Numbers, speeds: Numbers, paces: Numbers) -> float | None:
    """Slowest over ideal, in plain numbers, where all are known; None where that is not so."""
    try:
        together = total([1.0 / one for one in paces])
        if not (min(speeds) > 0 and 0 < together < math.inf):
            return None
        slowest = max([share * one for share, one in zip(shares, paces, strict=True)])
        return slowest * together / total(shares)
    except ODD:
        return None
