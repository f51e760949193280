"""``arima``: autoregression of the d-th difference, moving average of errors (LB-BSP's Table 3: 2, 2, 1).

All workers are fitted at once by conditional least squares. For a given moving-average weight theta the
rest is linear least squares, so the fit searches theta alone, within (-1, 1): the result is always invertible, and
the search stops in no local minimum. A thousand workers take some 50 ms, as long as one worker in statsmodels 0.15.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import numpy as np

from paceline.errors import whole
from paceline.forecast.ema import check_gain
from paceline.forecast.portable_math import solve
from paceline.forecast.protocol import Forecast, Reading, seen, smoothed
from paceline.rounds import Array

LEAST = 30  # rounds before the first fit; EMA predicts until then
BOUND = 0.98  # the largest |theta|, so that the model is invertible
SAFE = 0.5, 2.0  # a prediction stays within these multiples of the slowest and fastest round of the window


class ArimaState(NamedTuple):
    """Arrays of shape (..., n), unless a comment gives another one."""

    rounds: Array  # rounds so far, shape ()
    ema: Array
    past: Array  # (window, ..., n): speeds, newest last; predictions fill the gaps
    predicted: Array  # of the next round; bounded, so that no outlier enters the errors or fills a gap
    error: Array  # e^{k-1}, its newest error
    ar: Array  # (p, ..., n)
    ma: Array  # theta


@dataclass(frozen=True, slots=True)
class Arima(Forecast[ArimaState]):
    """ARIMA(p, d, q) of each worker's speed, fitted every ``refit`` rounds to the latest ``window``.

    LB-BSP, Table 3 (ARIMA).

    Args:
        p: Past differences in the regression.
        d: How often the series is differenced.
        q: Past errors in the regression, 0 or 1.
        window: Rounds to fit.
        refit: Rounds between two fits.
        gain: Weight of the newest reading in the EMA that predicts the first 30 rounds.
    """

    p: int = 2
    d: int = 2
    q: int = 1
    window: int = 256
    refit: int = 50
    gain: float = 0.2
    trains: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_gain("arima", self.gain)
        whole("forecast 'arima': p", self.p, 0)
        whole("forecast 'arima': d", self.d, 0)
        whole("forecast 'arima': q", self.q, 0, 1)
        whole("forecast 'arima': refit", self.refit)
        whole("forecast 'arima': window", self.window, LEAST + self.p + self.d)

    def init(self, shape: tuple[int, ...]) -> ArimaState:
        blank = np.full(shape, np.nan)
        ar, past = np.zeros((self.p, *shape)), np.full((self.window, *shape), np.nan)
        return ArimaState(np.array(0), blank, past, blank, np.zeros(shape), ar, np.zeros(shape))

    def step(self, state: ArimaState, reading: Reading) -> tuple[Array, ArimaState]:
        here = seen(reading.speed)
        value = np.where(here, reading.speed, state.predicted)
        error = np.where(here & np.isfinite(state.predicted), value - state.predicted, 0.0)
        ema = smoothed(state.ema, value, self.gain, here)
        # A worker's first speed fills its whole past, as if it had been constant.
        past = np.concatenate([np.where(np.isnan(state.past), value, state.past)[1:], value[None]])
        count = int(state.rounds) + 1
        after = ArimaState(np.array(count), ema, past, ema, error, state.ar, state.ma)
        if count > LEAST:
            after = after._replace(predicted=self._predicted(after))
        return after.predicted, after

    def train(self, state: ArimaState) -> ArimaState:
        count = int(state.rounds)
        if count < LEAST or (count - LEAST) % self.refit:
            return state
        held = state.past[-min(count, self.window) :]
        ar, ma = fit(np.diff(np.nan_to_num(held), self.d, axis=0), self.p, self.q)
        error = errors(np.diff(held, self.d, axis=0), ar, ma)[-1]
        fitted = state._replace(error=error, ar=ar, ma=ma)
        return fitted._replace(predicted=self._predicted(fitted))

    def _predicted(self, state: ArimaState) -> Array:
        """The fitted model's prediction for the next round, (..., n)."""
        past, ar = state.past, state.ar
        low, high = SAFE[0] * past.min(axis=0), SAFE[1] * past.max(axis=0)
        recent = past[len(past) - self.p - self.d :]
        change = np.diff(recent, self.d, axis=0)  # the newest p differences, newest last
        predicted = (ar * change[::-1]).sum(axis=0) + state.ma * state.error
        for j in range(1, self.d + 1):  # undo the differencing
            predicted = predicted - (-1) ** j * math.comb(self.d, j) * past[-j]
        return np.clip(predicted, low, high)


def errors(change: Array, ar: Array, ma: Array) -> Array:
    """e^t = z^t - sum_i ar_i z^{t-i} - ma e^{t-1}, zero before t = p; all (rounds, ..., n)."""
    p = len(ar)
    out = np.zeros_like(change)
    for t in range(p, len(change)):
        predicted = (ar * change[t - p : t][::-1]).sum(axis=0)
        out[t] = change[t] - predicted - (ma * out[t - 1] if t else 0.0)
    return out


def fit(change: Array, p: int, q: int) -> tuple[Array, Array]:
    """Conditional least squares: (ar (p, ..., n), ma (..., n)) for differences z of shape (rounds, ..., n).

    theta is searched on a grid over [-0.98, 0.98], then on finer ones around each worker's best, to within 0.001.
    """
    workers = change.shape[1:]
    if q == 0:
        ar, _ = _given_theta(change, np.zeros((1, *workers)), p)
        return ar[:, 0], np.zeros(workers)
    grid, width = np.linspace(-BOUND, BOUND, 21), 2 * BOUND / 20
    theta = np.broadcast_to(grid.reshape(-1, *[1] * len(workers)), (21, *workers))
    for _ in range(4):
        ar, loss = _given_theta(change, theta, p)
        best = np.argmin(loss, axis=0)[None]
        found = np.take_along_axis(theta, best, axis=0)
        ar = np.take_along_axis(ar, best[None], axis=1)[:, 0]
        finer = np.linspace(-width, width, 9).reshape(-1, *[1] * len(workers))
        theta, width = np.clip(found + finer, -BOUND, BOUND), width / 4
    return ar, found[0]


def _given_theta(change: Array, theta: Array, p: int) -> tuple[Array, Array]:
    """The best ar (p, g, ..., n) for each theta (g, ..., n), and its sum of squares (g, ..., n).

    z and its lags pass through 1 / (1 + theta B); the regression of the first on the others is then exact.
    """
    filtered = np.zeros((p + 1, *theta.shape))
    gram = np.zeros((p + 1, p + 1, *theta.shape))
    for t in range(p, len(change)):
        lags = change[t - p : t + 1][::-1, None]  # z^t, z^{t-1}, ..., z^{t-p}
        filtered = lags - theta * filtered
        for i in range(p + 1):
            gram[i, i:] += filtered[i] * filtered[i:]
    total = gram[0, 0]
    if p == 0:
        return np.zeros((0, *theta.shape)), total
    cross, square, diagonal = gram[0, 1:], gram[1:, 1:].copy(), np.arange(p)
    square[diagonal, diagonal] += 1e-10 * square[diagonal, diagonal].mean(axis=0) + 1e-300
    ar = solve(square, cross)
    return ar, total - (ar * cross).sum(axis=0)
