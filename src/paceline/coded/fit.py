"""Delay parameters from measured times, by maximum likelihood with standard errors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from paceline.coded.delay import Array, Delay, Empirical, ShiftedExponential, Weibull
from paceline.coded.problem import Problem, pair_table, positive, read_table, rows_for
from paceline.errors import PacelineError, among

FAMILIES = ("shifted-exponential", "weibull", "empirical")


@dataclass(frozen=True)
class Fit:
    """A fitted delay.

    standard_errors: by parameter name, in the parameter's unit, arrays of the pairs' shape; none for
        "empirical".
    log_likelihood: of all pairs' measurements.
    """

    delay: Delay
    standard_errors: dict[str, Array]
    log_likelihood: float


def fit(
    times: NDArray[np.object_],
    family: str = "shifted-exponential",
    finished: NDArray[np.object_] | None = None,
) -> Fit:
    """Fit every pair's milliseconds per row.

    times: object array of the pairs' shape, each entry 1-D, positive.
    finished: the same with bools: False if the work was cancelled after so long and would have taken
        longer (right-censored). Only "shifted-exponential" takes them; leaving them out favours the lucky
        times.

    Raises PacelineError if a pair has fewer than two different times, for then nothing is known of its
    spread.
    """
    if family not in FAMILIES:
        raise PacelineError(f"family={family!r}: expected one of {among(family, FAMILIES)}")
    if finished is not None and family != "shifted-exponential":
        raise PacelineError(f"family={family!r} cannot use cancelled work; choose 'shifted-exponential'")
    if family == "empirical":
        return Fit(Empirical(times), {}, 0.0)
    one = _shifted_exponential if family == "shifted-exponential" else _weibull
    fitted = np.empty(times.shape, object)
    for index in np.ndindex(times.shape):
        z = np.asarray(times[index], float)
        done = np.ones(len(z), bool) if finished is None else np.asarray(finished[index], bool)
        if not (np.isfinite(z).all() and (z > 0).all()):
            raise PacelineError(
                f"measured times of pair {index}: expected positive, finite milliseconds per row"
            )
        if done.sum() < 2 or np.ptp(z[done]) <= 0:
            raise PacelineError(
                f"pair {index} has {int(done.sum())} measured times, none of which differ: expected at least two "
                "that differ; measure it more often"
            )
        fitted[index] = one(z, done)

    def column(i: int) -> Array:
        return np.array([values[i] for values in fitted.ravel()]).reshape(times.shape)

    likelihood = float(column(-1).sum())
    if family == "shifted-exponential":
        return Fit(ShiftedExponential(column(0), column(1)), {"u": column(2), "a": column(3)}, likelihood)
    errors = {"u": column(3), "a": column(4), "k": column(5)}
    return Fit(Weibull(column(0), column(1), column(2)), errors, likelihood)


def _shifted_exponential(z: Array, done: NDArray[np.bool_]) -> tuple[float, ...]:
    """(u, a, their standard errors, log likelihood): a is the least time, 1 / u the mean excess over it."""
    a, count = float(z[done].min()), int(done.sum())
    u = count / float(np.maximum(z - a, 0.0).sum())
    return u, a, u / np.sqrt(count), 1 / (len(z) * u), count * (np.log(u) - 1)


def _weibull(z: Array, done: NDArray[np.bool_]) -> tuple[float, ...]:
    """(u, a, k, their standard errors, log likelihood).

    The likelihood grows without bound as a comes up to the least time (for k < 1), so a is kept one mean gap,
    (mean - least) / n, below it; that gap is also a's standard error.
    """
    from scipy.optimize import brentq, minimize_scalar

    count = len(z)
    least, gap = float(z.min()), float(z.mean() - z.min()) / count

    def given(a: float) -> tuple[float, float, float]:
        log_x = np.log((z - a) / (z.mean() - a))  # scaled: powers stay in range

        def slope(k: float) -> float:  # of the profile likelihood of k
            weight = np.exp(k * (log_x - log_x.max()))
            return 1 / k + float(log_x.mean() - weight @ log_x / weight.sum())

        k = brentq(slope, 1e-2, 1e3)
        log_scale = np.log(np.exp(k * (log_x - log_x.max())).mean()) / k + log_x.max()
        u = float(np.exp(-log_scale) / (z.mean() - a))
        likelihood = count * (np.log(k) + np.log(u) - 1) + (k - 1) * float(np.log(u * (z - a)).sum())
        return u, k, likelihood

    low, high = least * 1e-6, max(least - gap, least * 2e-6)
    found = minimize_scalar(lambda a: -given(a)[2], bounds=(low, high), method="bounded")
    a = float(found.x)
    u, k, likelihood = given(a)
    root = np.sqrt(count)
    # inverse Fisher information of scale and shape: 1.1087 (scale / k)^2 / n and 0.6079 k^2 / n
    return u, a, k, np.sqrt(1.1087) * u / (k * root), gap, np.sqrt(0.6079) * k / root, likelihood


def read_times(
    path: Path, rows: float | Mapping[str, float], family: str = "shifted-exponential"
) -> tuple[Problem, Fit]:
    """A problem fitted to a CSV file with columns master, worker, rows, milliseconds: one line a measured
    product.

    Raises PacelineError with the line at fault, or the pair with too few measurements.
    """
    lines = read_table(path, ("master", "worker", "rows", "milliseconds"))
    masters, workers, where = pair_table(lines, path)
    per_row = np.array(
        [positive(line, "milliseconds", path) / positive(line, "rows", path) for line in lines]
    )
    pair = where[:, 0] * len(workers) + where[:, 1]
    order = np.argsort(pair, kind="stable")
    measured = np.split(
        per_row[order], np.searchsorted(pair[order], np.arange(1, len(masters) * len(workers)))
    )
    times = np.empty((len(masters), len(workers)), object)
    for m, master in enumerate(masters):
        for n, worker in enumerate(workers):
            mine = times[m, n] = measured[m * len(workers) + n]
            if not len(mine):
                raise PacelineError(
                    f"{path} has no times for master {master!r} and worker {worker!r}: expected some for every pair"
                )
            if family != "empirical" and np.ptp(mine) <= 0:
                raise PacelineError(
                    f"{path} has {len(mine)} times for master {master!r} and worker {worker!r}: expected at least "
                    "two that differ per row"
                )
    fitted = fit(times, family)
    return Problem(masters, workers, rows_for(masters, rows), fitted.delay), fitted
