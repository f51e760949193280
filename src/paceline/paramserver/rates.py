"""The learning rate of an update from k of n gradients.

Fewer gradients make a noisier step, which needs a smaller rate: in proportion (Goyal et al. 2017; Chen et al. 2016),
from a range test for each k (Smith 2017), or from the actual gain in progress of k gradients (AdaScale, Johnson et
al. 2020). DBW itself uses the full rate for every k.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from paceline import options
from paceline.errors import PacelineError, number
from paceline.rounds import Array

__all__ = ["RATES", "AdaScale", "Fixed", "Knee", "Proportional", "Rate", "create", "gain", "knee"]

SMOOTHING = 0.9
BLOW_UP = 4.0


@dataclass(frozen=True)
class Rate:
    """A rule for the learning rate.

    Attributes:
        workers: Number of workers, n.
        full: The rate for an update from all n workers' gradients.
    """

    workers: int
    full: float
    # Whether ``of`` uses norm2 and variance, for which all gradients are read once more.
    needs_variance: ClassVar[bool] = False

    def of(self, k: float, norm2: float, variance: float) -> float:
        """The rate for an update from the mean of k gradients.

        Args:
            k: Samples in the mean, divided by those of one worker in an equal division; 0 to n.
            norm2: Estimate of the squared norm of the true gradient; NaN if unknown.
            variance: Estimate of the summed variance of one gradient; NaN if unknown.

        Returns:
            The learning rate.
        """
        return self.full


class Fixed(Rate):
    """The full rate for every k."""


class Proportional(Rate):
    """The full rate times k / n (DBW, baseline static-k)."""

    def of(self, k: float, norm2: float, variance: float) -> float:
        return self.full * k / self.workers


class AdaScale(Rate):
    """The full rate times r_k / r_n, where r_k = (variance + norm2) / (variance / k + norm2).

    r_k is the number of single-gradient steps that a step from k gradients is worth: from k (all noise) to 1 (none).
    """

    needs_variance: ClassVar[bool] = True

    def of(self, k: float, norm2: float, variance: float) -> float:
        if not (np.isfinite(norm2) and np.isfinite(variance)) or norm2 + variance <= 0:
            return self.full * k / self.workers
        return self.full * gain(k, norm2, variance) / gain(self.workers, norm2, variance)


@dataclass(frozen=True)
class Knee(Rate):
    """A separate rate for each k, found by range tests (DBW, baseline static-k).

    Attributes:
        workers: Number of workers, n.
        full: Unused.
        table: Rates for k = 1..n, separated by "/"; the rate of the nearest k is used.
    """

    table: str = ""

    def __post_init__(self) -> None:
        try:
            rates = [float(part) for part in self.table.split("/")]
        except ValueError:
            rates = []
        if len(rates) != self.workers or not all(rate > 0 for rate in rates):
            raise PacelineError(
                f"knee: table={self.table!r}: expected {self.workers} positive rates, one for each k, with / between"
            )

    def of(self, k: float, norm2: float, variance: float) -> float:
        return float(self.table.split("/")[max(round(k), 1) - 1])


class GradientNoise:
    """The estimates of the gradients' norm2 and variance, as for ``Rate.of``, smoothed over the updates."""

    norm2 = variance = math.nan

    def scale(self, samples: float) -> float:
        """The simple noise scale (McCandlish et al. 2018): the number of samples whose mean gradient has a variance
        equal to the gradient's squared norm. samples: of one gradient."""
        return min(self.variance * samples / max(self.norm2, 1e-300), 1e15)

    def updated(self, norm2: float, variance: float, gradients: int) -> None:
        """Note an update from the mean of ``gradients`` gradients, whose squared norm is ``norm2``. variance: of one
        gradient, NaN if it was not measured."""
        if math.isfinite(variance):
            self.norm2 = _mixed(self.norm2, max(norm2 - variance / gradients, 0.0))
            self.variance = _mixed(self.variance, variance)


RATES: dict[str, type[Rate]] = {
    "adascale": AdaScale,
    "fixed": Fixed,
    "knee": Knee,
    "proportional": Proportional,
}
"""The class of each rule, by its name in ``create``."""


def create(text: str, workers: int, full: float) -> Rate:
    """Make the rule named by ``text``.

    Args:
        text: ``fixed``, ``proportional``, ``adascale`` or ``knee:table=...``.
        workers: Number of workers, n.
        full: The rate for an update from all n workers' gradients.

    Returns:
        The rule.

    Raises:
        PacelineError: For an unknown rule, or a value out of range.
    """
    number("lr", full, "a positive learning rate that is finite", lambda lr: 0 < lr < np.inf)
    rate: Rate = options.build(RATES, text, "learning-rate rule", workers=workers, full=full)
    return rate


def gain(k: float, norm2: float, variance: float) -> float:
    """AdaScale's gain ratio of k gradients over one.

    Args:
        k: Number of gradients.
        norm2: Squared norm of the true gradient.
        variance: Summed variance of one gradient.

    Returns:
        The ratio, between 1 and k.
    """
    return (variance + norm2) / (variance / k + norm2)


def knee(rates: Array, losses: Array) -> float:
    """The rate at which the loss falls steepest over the logarithm of the rate (the range test's answer).

    Args:
        rates: The growing rate of each step, shape (steps,).
        losses: The loss after each step, shape (steps,); NaN or infinity at the end if the run diverged.

    Returns:
        The rate; a tenth of the rate of divergence if the loss never falls.

    Raises:
        PacelineError: For arrays that do not fit.
    """
    usable = np.isfinite(losses) & (np.cumsum(~np.isfinite(losses)) == 0)
    rates, losses = rates[usable], losses[usable]
    if len(losses) < 2:
        raise PacelineError("the range test diverged at once; begin it with a smaller rate")
    weights = (1 - SMOOTHING) * SMOOTHING ** np.arange(len(losses))
    smooth = np.convolve(losses, weights)[: len(losses)] / np.cumsum(weights)
    best = np.minimum.accumulate(smooth)
    span = max(1, len(smooth) // 12)  # slopes over a span: single steps are noise
    blown = np.flatnonzero((smooth > BLOW_UP * best) | (smooth > 1.1 * smooth[:span].max()))
    end = int(blown[0]) if len(blown) else len(smooth)
    if end <= 2 * span:
        return float(rates[min(end, len(rates) - 1)]) / 10.0
    low, high = np.arange(span, end - span), np.arange(2 * span, end)
    slope = (smooth[high] - smooth[low]) / np.log(rates[high] / rates[low])
    if slope.min() >= 0:
        return float(rates[min(end, len(rates) - 1)]) / 10.0
    steepest = int(np.argmin(slope))
    return float(np.sqrt(rates[low[steepest]] * rates[high[steepest]]))


def _mixed(old: float, new: float) -> float:
    return new if math.isnan(old) else 0.8 * old + 0.2 * new
