"""Algorithm 3 of Sun et al. (2019): probabilities and loads together by successive convex approximation.

Kept as the paper has it, to compare with: ``exact.probabilistic`` reaches the same optimum as one linear
programme (docs/coded.md has the proof). Needs cvxpy.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from paceline.coded.delay import Array, ShiftedExponential
from paceline.errors import PacelineError


class Iterate(NamedTuple):
    """z_r: probabilities and loads, shape (M, N), and the completion time in ms they stand for."""

    k: Array
    loads: Array
    t: float


def successive(delay: ShiftedExponential, rows: Array, alpha: float = 1e-3) -> Iterator[Iterate]:
    """z_0, z_1, ... without end, from k = 1 / M with its best loads.

    alpha: decreasing ratio of the step sizes gamma_{r+1} = gamma_r (1 - alpha gamma_r), in (0, 1).

    Loads are measured in units of the largest L times M / N, and times likewise: in unscaled rows the
    solver's tolerance is larger than the constraint's slack and its answers are infeasible by tens of per
    cent. Sun et al., eqs. (10), (11), Lemma 2.
    """
    try:
        import cvxpy as cp
    except ImportError as error:
        raise PacelineError(
            "the successive convex approximation needs cvxpy: pip install 'paceline[sca]', or choose "
            "'probabilistic', which finds the same optimum without it"
        ) from error
    if not 0 < alpha < 1:
        raise PacelineError(f"alpha={alpha:g}: expected a decreasing ratio between 0 and 1")
    masters, workers = delay.shape
    phi, rate = delay.peak()
    load_unit = float(rows.max()) * masters / workers
    time_unit = load_unit * float(np.median(phi))
    u = delay.u * time_unit / load_unit
    weight = np.exp(np.minimum(delay.u * delay.a, 500.0))
    need = rows / load_unit

    k = np.full((masters, workers), 1 / masters)
    t = float((rows * masters / rate.sum(1)).max()) / time_unit
    loads = t * time_unit / phi / load_unit
    gamma = 1.0

    k_next = cp.Variable((masters, workers), nonneg=True)
    l_next = cp.Variable((masters, workers), nonneg=True)
    late = cp.Variable((masters, workers), nonneg=True)  # at least l exp(-u t / l)
    t_next = cp.Variable(nonneg=True)
    k_at, l_at = (cp.Parameter((masters, workers)) for _ in range(2))  # slopes at z_r
    constant = cp.Parameter(masters)
    t_slope = cp.Parameter(masters)
    # g~ + e^{ua} h~ of Lemma 2: the convex parts stay, the concave ones are linear at z_r
    convex = (cp.square(k_next) + cp.square(l_next)) / 2 + cp.multiply(weight, cp.square(k_next + late)) / 2
    linear = cp.multiply(k_at, k_next) + cp.multiply(l_at, l_next)
    shortfall = cp.sum(convex - linear, axis=1) - t_slope * t_next + constant + need
    problem = cp.Problem(
        cp.Minimize(t_next),
        [
            shortfall <= 0,
            cp.sum(k_next, axis=0) <= 1,
            cp.constraints.ExpCone(-cp.multiply(u, t_next * np.ones((masters, workers))), l_next, late),
        ],
    )
    while True:
        yield Iterate(k.copy(), loads * load_unit, t * time_unit)
        e = np.exp(-u * t / np.maximum(loads, 1e-300))
        # g- = (k + l)^2 / 2 and h- = (k^2 + l^2 e^{-2ut/l}) / 2
        k_slope = (k + loads) + weight * k
        l_slope = (k + loads) + weight * e * e * (loads + u * t)
        time_slope = weight * -u * loads * e * e
        minus = (k + loads) ** 2 / 2 + weight * (k * k + (loads * e) ** 2) / 2
        k_at.value, l_at.value = k_slope, l_slope
        t_slope.value = time_slope.sum(1)
        constant.value = (k_slope * k + l_slope * loads + time_slope * t - minus).sum(1)
        with warnings.catch_warnings():
            # Near the fixed point the solver calls itself inaccurate.
            warnings.simplefilter("ignore", UserWarning)
            problem.solve(solver=cp.CLARABEL)
        if problem.status not in (cp.OPTIMAL, cp.OPTIMAL_INACCURATE):
            raise PacelineError(
                f"the convex approximation was not solved ({problem.status}); choose 'probabilistic'"
            )
        k = k + gamma * (np.clip(np.asarray(k_next.value), 0, 1) - k)
        loads = loads + gamma * (np.maximum(np.asarray(l_next.value), 0) - loads)
        t = t + gamma * (float(np.asarray(t_next.value)) - t)
        gamma *= 1 - alpha * gamma


def sca(
    delay: ShiftedExponential,
    rows: Array,
    alpha: float = 1e-3,
    tolerance: float = 1e-6,
    iterations: int = 300,
) -> Iterate:
    """The iterate where |1 - t' / t| < tolerance, or the last of ``iterations`` (Sun et al., Algorithm 3)."""
    before = None
    for count, now in enumerate(successive(delay, rows, alpha)):
        if count >= iterations or (before is not None and abs(1 - now.t / before.t) < tolerance):
            break
        before = now
    return now
