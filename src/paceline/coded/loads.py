"""How many rows each worker takes once it is known whom it serves: Theorem 1 of Sun et al. (2019), and beyond
it.

The expected rows by time t are sum_n k_n l_n F_n((t - d_n) / l_n), with d the latency. The loads are separate
terms of that sum, so each is best alone, at l_n = (t - d_n) / phi_n, where a worker brings rate_n (t - d_n)
rows in expectation. The paper asks that -l F(t / l) be convex for its multiplier method; here no convexity is
needed.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from paceline.coded.delay import Array
from paceline.coded.problem import Problem


def completion(problem: Problem, k: Array, rate: Array) -> Array:
    """t*, shape (M,): milliseconds by which L rows are expected, sum_n k rate (t - d)+ = L; inf with no
    workers.

    rate: rows per millisecond, shape (M, N), from ``Delay.peak``.
    """
    brings = k * rate
    if problem.latency is None:
        with np.errstate(divide="ignore"):
            return problem.rows / brings.sum(1)
    result = np.full(len(brings), np.inf)
    for m, rows in enumerate(problem.rows):
        # workers join in order of latency; the level is that of the first j that lies below the next one's
        # latency
        order = np.argsort(problem.latency[m], kind="stable")
        speeds, latency = brings[m, order], problem.latency[m, order]
        total = np.cumsum(speeds)
        with np.errstate(divide="ignore", invalid="ignore"):
            levels = (rows + np.cumsum(speeds * latency)) / total
        fits = (total > 0) & (levels <= np.append(latency[1:], np.inf))
        if fits.any():
            result[m] = levels[np.argmax(fits)]
    return result


def coded_loads(problem: Problem, k: Array, t: Array, phi: Array) -> Array:
    """l = (t_m - d)+ / phi where k > 0, shape (M, N): fractional rows."""
    spare = np.where(np.isfinite(t), t, 0.0)[:, None]
    if problem.latency is not None:
        spare = np.maximum(spare - problem.latency, 0.0)
    return np.where(k > 0, spare / phi, 0.0)


def uncoded_loads(problem: Problem, k: Array, equal: bool) -> Array:
    """L divided among a master's workers: equally as in the paper's benchmark, else by their mean speed."""
    weight = (k > 0) / (1.0 if equal else problem.delay.mean())
    return problem.rows[:, None] * weight / weight.sum(1, keepdims=True)


def whole_rows(loads: Array, rows: Array, coded: bool) -> NDArray[np.int64]:
    """Loads in whole rows, shape (M, N): rounded up where coded, exactly L in sum where uncoded."""
    if coded:
        return np.ceil(loads - 1e-9 * np.maximum(loads, 1.0)).astype(np.int64)
    whole = np.floor(loads).astype(np.int64)
    for m, missing in enumerate(rows.astype(np.int64) - whole.sum(1)):
        largest = np.argsort(whole[m] - loads[m], kind="stable")[:missing]
        whole[m, largest] += 1
    return whole


def expected_completion(problem: Problem, loads: Array) -> Array:
    """E[time when all of a master's workers are done], shape (M,): an uncoded plan's t*, by integrating P[T >
    t].
    """
    result = np.zeros(len(loads))
    for m in range(len(loads)):
        mine = np.flatnonzero(loads[m] > 0)
        delay, load = problem.delay.take((m, mine)), loads[m, mine]
        wait = 0.0 if problem.latency is None else problem.latency[m, mine]

        def late(
            t: Array, delay: object = delay, load: Array = load, wait: float | Array = wait
        ) -> Array:  # P[some worker later than t]
            z = np.maximum(t[:, None] - wait, 0.0) / load
            return 1 - np.prod(delay.cdf(z), axis=1)  # type: ignore[attr-defined]

        middle = end = float((wait + load * delay.mean()).max())
        while late(np.array([end]))[0] > 1e-12:
            end *= 1.5
        edges = np.concatenate([np.linspace(0.0, middle, 1001), np.geomspace(middle, end, 1001)[1:]])
        nodes, weights = np.polynomial.legendre.leggauss(4)
        half = 0.5 * np.diff(edges)
        t = (edges[:-1, None] + half[:, None] * (nodes + 1)).ravel()
        result[m] = float(late(t) @ (half[:, None] * weights).ravel())
    return result
