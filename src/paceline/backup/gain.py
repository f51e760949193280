"""How much an update from k gradients is expected to lower the loss: DBW's eqs. (10) to (16)."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from paceline.backup.protocol import Iteration
from paceline.rounds import Array


class GainState(NamedTuple):
    """The last D estimates, newest last, NaN where there was none; each of shape (D,)."""

    variance: Array  # V+, eq. (10)
    norm2: Array  # N+, eq. (11)
    smoothness: Array  # L+, eq. (12)
    loss: float  # F of the last iteration; NaN before the first
    spread: float  # V+ / k of the last iteration, 0 where unknown


class Gain(NamedTuple):
    """Averages over the last D iterations, eqs. (13) to (15); NaN before the first estimate."""

    variance: float
    norm2: float
    smoothness: float

    def of(self, k: Array, rate: float) -> Array:
        """Expected decrease of the loss by an update from k gradients, eq. (16); same shape as k."""
        bend = 0.5 * self.smoothness * rate**2
        return (rate - bend) * self.norm2 - bend * self.variance / k


def start(depth: int) -> GainState:
    """Nothing known yet. depth: D."""
    nothing = np.full(depth, np.nan)
    return GainState(nothing, nothing, nothing, np.nan, 0.0)


def update(state: GainState, happened: Iteration) -> GainState:
    """Take in one iteration.

    L+ compares the loss with that of the iteration before, so it comes one iteration later.
    """
    k = happened.quorum
    spread = happened.variance / k if np.isfinite(happened.variance) else 0.0
    norm2 = max(happened.norm2 - spread, 0.0) if np.isfinite(happened.variance) else np.nan
    smoothness = np.nan
    before = state.norm2[-1]
    bottom = happened.rate**2 * (before + state.spread)
    if np.isfinite(state.loss) and np.isfinite(before) and bottom > 0:
        decrease = state.loss - happened.loss
        smoothness = 2.0 * (happened.rate * before - decrease) / bottom
    return GainState(
        _pushed(state.variance, happened.variance),
        _pushed(state.norm2, norm2),
        _pushed(state.smoothness, smoothness),
        happened.loss,
        spread,
    )


def estimate(state: GainState) -> Gain:
    """What the next iteration may expect.

    The loss is measured on samples, so about half of the single L+ are negative. Their average is cut off at 0
    (with a negative one the gain would fall with k); cutting each of them off would bias it upwards.
    """
    return Gain(_mean(state.variance), _mean(state.norm2), np.maximum(_mean(state.smoothness), 0.0))


def _pushed(values: Array, newest: float) -> Array:
    return np.append(values[1:], newest)


def _mean(values: Array) -> float:
    known = values[~np.isnan(values)]
    return float(known.mean()) if len(known) else np.nan
