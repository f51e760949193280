"""The time that a row takes: the delay of each master-worker pair, Sun et al. (2019) with their footnote 2.

A worker that computes l rows takes T(l) = l Z; Z, milliseconds for one row, is drawn again for every product. A
delay holds the parameters of Z for many pairs at once, in arrays of one common shape (usually masters x workers).
For every distribution, a plan needs two numbers for each pair (``peak``): the largest rate at which rows can be
expected, max over z of F(z) / z, and the z at which it is reached. ``fit`` estimates the parameters from measured
times, by maximum likelihood, with standard errors.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, fields
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray
from scipy.special import exprel, gamma

from paceline.costs import Array
from paceline.errors import PacelineError, among

LARGEST = 1e150  # of a parameter, and its reciprocal the least, so that products of two are finite
# Coefficients of s - log(1 + s) = s^2 (1/2 - s/3 + s^2/4 - ...), highest power first.
_SERIES = [(-1.0) ** k / (k + 2) for k in range(17, -1, -1)]


def log1p_gap(s: Array) -> Array:
    """s - log(1 + s) without cancellation, s >= 0."""
    s = np.asarray(s, float)
    small = s < 0.1
    near = np.where(small, s, 0.0)
    return np.where(small, near * near * np.polyval(_SERIES, near), s - np.log1p(s))


def shifted_exponential_level(shift: Array) -> Array:
    """-W_{-1}(-exp(-c - 1)) - 1 for c = u a > 0: the positive root s of s - log(1 + s) = c.

    It uses Newton's method from the upper bound c + sqrt(2 c): the left side is convex, so every step stays above
    the root. Lambert's W itself fails at both ends: exp(-c - 1) underflows for c > 744 and cancels for c near 0.
    """
    c = np.asarray(shift, float)
    s = c + np.sqrt(2 * c)
    for _ in range(12):
        s = s - (log1p_gap(s) - c) * (1 + s) / s
    return s


class Delay(ABC):
    """The distribution of the milliseconds for one row, for every pair; all arrays broadcast against ``shape``.

    Fields are arrays that share one shape, and are indexed together.

    Attributes:
        a: The least milliseconds for a row.
    """

    a: Array

    def __post_init__(self) -> None:
        """Give every field the common shape; raises PacelineError for values that are not positive and finite."""
        named = {f.name: np.asarray(getattr(self, f.name), float) for f in fields(self)}  # type: ignore[arg-type]
        for (name, _), values in zip(named.items(), np.broadcast_arrays(*named.values()), strict=True):
            bad = np.argwhere(~((values > 1 / LARGEST) & (values < LARGEST)))
            if len(bad):
                where = tuple(int(i) for i in bad[0])
                raise PacelineError(
                    f"{name}={values[where]:g} for pair {where}: expected a positive, finite number from "
                    f"{1 / LARGEST:g} to {LARGEST:g}; measure it again"
                )
            object.__setattr__(self, name, values)

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the pairs."""
        return np.shape(self.a)

    def take(self, index: Any) -> Self:
        """Select pairs.

        Args:
            index: A numpy index into the parameters' arrays.

        Returns:
            The delays of these pairs.
        """
        return type(self)(**{f.name: getattr(self, f.name)[index] for f in fields(self)})  # type: ignore[arg-type]

    @abstractmethod
    def cdf(self, z: Array) -> Array:
        """The distribution function.

        Args:
            z: Milliseconds for a row; broadcasts against ``shape``.

        Returns:
            P[Z <= z], of the broadcast shape.
        """

    def pdf(self, z: Array) -> Array:
        """The density.

        Args:
            z: Milliseconds for a row; broadcasts against ``shape``.

        Returns:
            1/ms per row, of the broadcast shape.

        Raises:
            NotImplementedError: For a delay without a density.
        """
        raise NotImplementedError

    @abstractmethod
    def sample(self, rng: np.random.Generator, runs: int) -> Array:
        """Draw independent times.

        Args:
            rng: The source of the draws.
            runs: Number of draws for each pair.

        Returns:
            Milliseconds for a row, shape (runs, *shape).
        """

    @abstractmethod
    def mean(self) -> Array:
        """The mean time.

        Returns:
            E[Z], milliseconds for a row.
        """

    def peak(self) -> tuple[Array, Array]:
        """The z for which F(z) / z is largest: the time with the most rows per millisecond.

        It is the z > a with z f(z) = F(z), which bisection of log(z - a) finds: F is log-concave in log(z - a), so z
        f(z) / F(z) falls and crosses 1 once.

        Returns:
            phi, this z in milliseconds per row, and the rate F(phi) / phi in rows per millisecond.
        """
        scale = self.mean()
        low, high = np.log(scale) - 40.0, np.log(scale) + 8.0
        for _ in range(90):
            middle = 0.5 * (low + high)
            z = self.a + np.exp(middle)
            rising = z * self.pdf(z) > self.cdf(z)
            low, high = np.where(rising, middle, low), np.where(rising, high, middle)
        z = self.a + np.exp(0.5 * (low + high))
        return z, self.cdf(z) / z


@dataclass(frozen=True, slots=True)
class ShiftedExponential(Delay):
    """Z = a + E / u with E ~ Exp(1) (Sun et al., eq. (1)).

    Attributes:
        u: 1 / (mean milliseconds of a row beyond a), per millisecond, positive.
        a: Least milliseconds for a row, positive.
    """

    u: Array
    a: Array

    def cdf(self, z: Array) -> Array:
        return -np.expm1(-self.u * np.maximum(z - self.a, 0.0))

    def pdf(self, z: Array) -> Array:
        return np.where(z >= self.a, self.u * np.exp(-self.u * np.maximum(z - self.a, 0.0)), 0.0)

    def sample(self, rng: np.random.Generator, runs: int) -> Array:
        draws = rng.standard_exponential((runs, *self.shape))
        draws /= self.u
        draws += self.a
        return draws

    def mean(self) -> Array:
        return self.a + 1 / self.u

    def peak(self) -> tuple[Array, Array]:
        """The closed form (Sun et al., Theorem 1).

        Returns:
            phi = s / u and the rate u / (1 + s), in which s - log(1 + s) = u a.
        """
        s = shifted_exponential_level(self.u * self.a)
        return s / self.u, self.u / (1 + s)


@dataclass(frozen=True, slots=True)
class Weibull(Delay):
    """Z = a + E^(1/k) / u with E ~ Exp(1); the tail is heavier than the exponential's for k < 1, lighter for k > 1.

    Attributes:
        u: Per millisecond.
        a: Least milliseconds for a row.
        k: The shape, without unit; all positive.
    """

    u: Array
    a: Array
    k: Array

    def cdf(self, z: Array) -> Array:
        return -np.expm1(-((self.u * np.maximum(z - self.a, 0.0)) ** self.k))

    def pdf(self, z: Array) -> Array:
        x = self.u * np.maximum(z - self.a, 1e-300)
        return np.where(z > self.a, self.k * self.u * x ** (self.k - 1) * np.exp(-(x**self.k)), 0.0)

    def sample(self, rng: np.random.Generator, runs: int) -> Array:
        return self.a + rng.standard_exponential((runs, *self.shape)) ** (1 / self.k) / self.u

    def mean(self) -> Array:
        return self.a + gamma(1 + 1 / self.k) / self.u


@dataclass(frozen=True, slots=True)
class Transmitted(Delay):
    """Each row is computed and then sent: Z = a + E1 / u + E2 / gamma (the journal version's communication delay).

    Attributes:
        u: 1 / (mean milliseconds of a row beyond ``a``), per millisecond, positive.
        a: Least milliseconds for a row.
        gamma: 1 / (mean milliseconds to send the result of a row), per millisecond, positive.
    """

    u: Array
    a: Array
    gamma: Array

    def _density_over_gamma(self, y: Array) -> Array:
        # u (exp(-u y) - exp(-gamma y)) / (gamma - u), in a form that is exact also for equal rates
        slow = np.minimum(self.u, self.gamma)
        return self.u * y * np.exp(-slow * y) * exprel(-np.abs(self.gamma - self.u) * y)

    def cdf(self, z: Array) -> Array:
        y = np.maximum(z - self.a, 0.0)
        return np.maximum(-np.expm1(-self.u * y) - self._density_over_gamma(y), 0.0)

    def pdf(self, z: Array) -> Array:
        return self.gamma * self._density_over_gamma(np.maximum(z - self.a, 0.0))

    def sample(self, rng: np.random.Generator, runs: int) -> Array:
        first, second = rng.standard_exponential((2, runs, *self.shape))
        return self.a + first / self.u + second / self.gamma

    def mean(self) -> Array:
        return self.a + 1 / self.u + 1 / self.gamma


@dataclass(frozen=True, slots=True)
class Empirical(Delay):
    """Z drawn from measured times, without an assumed distribution.

    Attributes:
        times: Object array of the pairs' shape; each entry the measured milliseconds per row, 1-D, positive.
    """

    times: NDArray[np.object_]

    def __post_init__(self) -> None:
        kept = np.empty(np.shape(self.times), object)
        for index in np.ndindex(kept.shape):
            values = np.sort(np.asarray(self.times[index], float).ravel())
            if not (len(values) and np.isfinite(values).all() and values[0] > 0):
                raise PacelineError(
                    f"measured times of pair {index}: expected positive, finite milliseconds per row"
                )
            kept[index] = values
        object.__setattr__(self, "times", kept)

    @property
    def shape(self) -> tuple[int, ...]:
        return self.times.shape

    def take(self, index: Any) -> Empirical:
        taken = self.times[index]
        if taken.dtype != object:  # a single pair: ``taken`` is the array of its measurements
            single = np.empty((), object)
            single[()] = taken
            return Empirical(single)
        return Empirical(taken)

    def _each(self, of: Any) -> Array:
        return np.array([of(times) for times in self.times.ravel()], float).reshape(self.shape)

    def cdf(self, z: Array) -> Array:
        z = np.asarray(z, float)
        shape = np.broadcast_shapes(z.shape, self.shape)
        z, result = np.broadcast_to(z, shape), np.empty(shape)
        for index in np.ndindex(self.shape):
            values = self.times[index]
            at = (..., *index)
            result[at] = np.searchsorted(values, z[at], side="right") / len(values)
        return result

    def sample(self, rng: np.random.Generator, runs: int) -> Array:
        result = np.empty((runs, *self.shape))
        for index in np.ndindex(self.shape):
            result[(slice(None), *index)] = rng.choice(self.times[index], runs)
        return result

    def mean(self) -> Array:
        return self._each(np.mean)

    def peak(self) -> tuple[Array, Array]:
        """F jumps at the measurements, so the largest F(z) / z is at one of them.

        Returns:
            phi and the rate, as for all delays.
        """

        def rates(values: Array) -> Array:
            return np.arange(1, len(values) + 1) / len(values) / values

        return self._each(lambda v: v[np.argmax(rates(v))]), self._each(lambda v: rates(v).max())


FAMILIES = ("shifted-exponential", "weibull", "empirical")


@dataclass(frozen=True)
class Fit:
    """A fitted delay.

    Attributes:
        delay: The fitted delay.
        standard_errors: By parameter name, in the parameter's unit, arrays of the pairs' shape; none for "empirical".
        log_likelihood: Of all pairs' measurements.
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

    Args:
        times: Object array of the pairs' shape; each entry has the pair's measurements, 1-D, positive.
        family: The name of a distribution, one of ``FAMILIES``.
        finished: The same with bools, False if the work was cancelled after that time and would have taken longer
            (right-censored). Only "shifted-exponential" takes them; without them, short times are overrepresented.

    Returns:
        The delays of the pairs' shape, with the errors of their parameters.

    Raises:
        PacelineError: For an unknown family, times that are not positive, or a pair with fewer than two different
            times, since its spread is then unknown.
    """
    if not isinstance(family, str) or family not in FAMILIES:
        raise PacelineError(f"family={family!r}: expected one of {among(family, FAMILIES)}")
    if finished is not None and family != "shifted-exponential":
        raise PacelineError(f"family={family!r} cannot use cancelled work; choose 'shifted-exponential'")
    if family == "empirical":
        return Fit(Empirical(times), {}, 0.0)
    one = fit_shifted_exponential if family == "shifted-exponential" else _weibull
    fitted = []
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
        fitted.append(one(z, done))
    *found, likelihoods = np.array(fitted).T.reshape(-1, *times.shape)
    parameters, errors = found[: len(found) // 2], found[len(found) // 2 :]
    delay = Weibull(*parameters) if family == "weibull" else ShiftedExponential(*parameters)
    return Fit(delay, dict(zip("uak", errors, strict=False)), float(likelihoods.sum()))


def fit_shifted_exponential(z: Array, done: NDArray[np.bool_]) -> tuple[float, ...]:
    """(u, a, their standard errors, log likelihood): a is the least time, 1 / u the mean excess over it."""
    a, count = float(z[done].min()), int(done.sum())
    u = count / float(np.maximum(z - a, 0.0).sum())
    return u, a, u / np.sqrt(count), 1 / (len(z) * u), count * (np.log(u) - 1)


def _weibull(z: Array, done: NDArray[np.bool_]) -> tuple[float, ...]:
    """(u, a, k, their standard errors, log likelihood).

    The likelihood grows without bound as a approaches the least time (for k < 1), so a stays one mean gap,
    (mean - least) / n, below it; that gap is also the standard error of a.
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
