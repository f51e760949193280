"""Logarithms, exponentials, quantiles and solutions of small systems, the same to the last bit on every processor.

Ranks on different machines must make the same plans. The last bit of numpy's logarithms and exponentials depends on
the processor, so for one run (arrays of shape (n,) or a single number) those of the C library are used, number by
number. All other operations that decisions use give the same result everywhere: sums, products, quotients and roots
are rounded as IEEE 754 says, and ``sum`` along the last axis adds in an order that depends on the number of workers
alone. (Products of matrices differ between machines, so decisions do not use them.)
"""

from __future__ import annotations

import math
from statistics import NormalDist
from typing import Any

import numpy as np

from paceline.costs import Array

__all__ = ["exp", "log", "quantile", "solve"]

ONE_RUN = 4096  # workers of one run; with more, speed matters more than agreement of different machines
LARGEST = 709.0  # its exponential is certainly a float


def log(values: Any) -> Array:
    """The natural logarithm, with the same bits on every machine for the arrays of one run.

    Args:
        values: Numbers of any shape.

    Returns:
        The shape of ``values``; minus infinity for 0, and NaN below 0.
    """
    values = np.asarray(values, float)
    if values.ndim > 1 or values.size > ONE_RUN:
        return np.asarray(np.log(values))
    numbers = values.ravel().tolist()
    try:
        found = list(map(math.log, numbers))
    except ValueError:  # some are 0 or less
        found = [math.log(x) if x > 0 else -math.inf if x == 0 else math.nan for x in numbers]
    return np.array(found).reshape(values.shape)


def exp(values: Array) -> Array:
    """The exponential, with the same bits on every machine for the arrays of one run.

    Args:
        values: Numbers of any shape.

    Returns:
        The shape of ``values``.
    """
    if values.ndim > 1 or values.size > ONE_RUN:
        return np.asarray(np.exp(values))
    numbers = values.ravel().tolist()
    if values.max(initial=0.0) < LARGEST:
        found = list(map(math.exp, numbers))
    else:  # some are too large, or NaN
        found = [math.exp(x) if x < LARGEST else float(np.exp(x)) for x in numbers]
    return np.array(found).reshape(values.shape)


def quantile(parts: Array) -> Array:
    """Quantiles of a standard normal variable, with the same bits on every machine for the arrays of one run.

    Args:
        parts: Probabilities from 0 to 1/2, or NaN, of any shape.

    Returns:
        The shape of ``parts``.
    """
    if parts.ndim > 1 or parts.size > ONE_RUN:
        from scipy.special import ndtri  # its import takes a fifth of a second, which ranks do not need

        return np.asarray(ndtri(parts))
    found = [
        _normal(part) if 0 < part < 1 else math.nan if part else -math.inf for part in parts.ravel().tolist()
    ]
    return np.array(found).reshape(parts.shape)


def solve(square: Array, right: Array) -> Array:
    """Solve small symmetric positive definite systems, many at once, by elimination without exchanges.

    Args:
        square: The matrices, shape (p, p, ...); only the upper triangles are read.
        right: The right sides, shape (p, ...).

    Returns:
        The solutions, shape (p, ...), with the same bits on every machine.
    """
    size, square, found = len(right), square.copy(), right.copy()
    for k in range(size):
        for i in range(k + 1, size):
            factor = square[k, i] / square[k, k]
            square[i, i:] -= factor * square[k, i:]
            found[i] -= factor * found[k]
    for k in reversed(range(size)):
        for i in range(k + 1, size):
            found[k] -= square[k, i] * found[i]
        found[k] /= square[k, k]
    return found


_normal = NormalDist().inv_cdf
