"""How good was a forecast: its error, and the time per round that its errors cost.

Shared by benchmarks, simulations and the reproduction of LB-BSP's Table 3.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from paceline.forecast.protocol import AnyForecast, Reading, seen
from paceline.rounds import Array


class Rating(NamedTuple):
    """What LB-BSP's Table 3 lists, and the distance to the best possible; averages over the rounds rated.

    rmse: root mean square error in samples/s, mean over workers.
    time: seconds per round with loads in proportion to the forecast, over those of the equal split (BSP).
    over_oracle: the same seconds over those with loads in proportion to the true speeds; at least 1.
    """

    rmse: float
    time: float
    over_oracle: float


def walk(forecast: AnyForecast, speed: Array, cpu: Array | None = None, memory: Array | None = None) -> Array:
    """The prediction for every round of a series, shape (rounds, ..., n); NaN in round 0, which is blind.

    speed: v^k of each round, shape (rounds, ..., n); cpu, memory: c^k and m^k as they read when round k
    began. The prediction for round k is made from speeds up to k-1 and readings up to k.
    """
    predicted = np.full(speed.shape, np.nan)
    state = forecast.init(speed.shape[1:])
    for k in range(1, len(speed)):
        reading = Reading(
            speed[k - 1], None if cpu is None else cpu[k], None if memory is None else memory[k]
        )
        predicted[k], state = forecast.step(state, reading)
    return predicted


def rmse(predicted: Array, speed: Array) -> Array:
    """Root mean square error of each worker over the leading axis; rounds without either are left out."""
    with np.errstate(invalid="ignore"):
        return np.sqrt(np.nanmean((predicted - speed) ** 2, axis=0))


def seconds(weights: Array, speed: Array) -> Array:
    """Seconds until the last worker is done with its part of one sample, parts in proportion to weights.

    Both of shape (..., n); the result has shape (...). A worker without a speed is absent and takes
    nothing; one without a weight takes the mean of the others'.
    """
    here = seen(speed)
    known = here & np.isfinite(weights)
    number = np.maximum(known.sum(axis=-1, keepdims=True), 1)
    mean = np.where(known, weights, 0).sum(axis=-1, keepdims=True) / number
    mean = np.where(mean > 0, mean, 1.0)  # nobody is known: the equal split
    weights = np.where(here, np.where(known, weights, mean), 0)
    with np.errstate(invalid="ignore", divide="ignore"):
        parts = weights / weights.sum(axis=-1, keepdims=True)
        return np.where(here, parts / speed, 0).max(axis=-1)


def rate(predicted: Array, speed: Array, skip: int = 500) -> Rating:
    """Rate predictions of shape (rounds, ..., n) after the first ``skip`` rounds, while forecasts learn."""
    predicted, speed = predicted[skip:], speed[skip:]
    spent = seconds(predicted, speed).mean()
    equal = seconds(np.ones_like(speed), speed).mean()
    oracle = seconds(speed, speed).mean()
    return Rating(float(rmse(predicted, speed).mean()), float(spent / equal), float(spent / oracle))
