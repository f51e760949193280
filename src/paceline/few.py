"""Decisions about few workers in plain numbers: numpy takes a microsecond for an operation on two of them.

A round's decision is some hundred operations. So the functions that an engine calls each round have two forms, one
of arrays of any shape and one of lists, for one run of at most ``FEW`` workers in which nothing unusual happened
(everybody was measured before, nobody was absent); ``None`` from the second form leaves it to the first. Both
give the same numbers to the last bit, for which they add in the same order and take logarithms from one place.

That place is the C library, as far as one run is concerned: numpy's own logarithms and exponentials depend in their
last bit on what the processor has, and ranks on unlike machines must make the same plans.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import reduce
from operator import add
from statistics import NormalDist
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Numbers = list[float]
Values = Any
"""Part of a state: an array of shape (..., n), or a list of n numbers, whichever the newest round left."""

FEW = 64  # workers; beyond some 100, arrays are as quick, and numpy adds in another order
ONE_RUN = 4096  # workers of one run: beyond, the time counts more than that unlike machines agree
LARGEST = 709.0  # of which the exponential is a float for certain
ODD = (ArithmeticError, ValueError)  # what plain numbers raise where arrays give infinities and NaN


def few(values: Array) -> bool:
    """Whether these are of one run with few workers."""
    return values.ndim == 1 and len(values) <= FEW


def numbers(values: Values) -> Numbers:
    """As plain numbers; there must be one run of them."""
    return values if type(values) is list else values.tolist()


def all_numbers(state: Iterable[Values]) -> Iterable[Numbers]:
    """Each part of a state as plain numbers; a round leaves all of them as lists, or none."""
    parts = list(state)
    return parts if type(parts[0]) is list else map(numbers, parts)


def total(values: Numbers) -> float:
    """The sum, in the order in which numpy adds."""
    if len(values) < 8:
        return reduce(
            add, values, 0.0
        )  # not ``sum``, which from Python 3.12 on makes up for what rounding loses
    a, b, c, d, e, f, g, h = values[:8]
    whole = len(values) // 8 * 8
    for start in range(8, whole, 8):
        i, j, k, m, n, o, p, q = values[start : start + 8]
        a, b, c, d, e, f, g, h = a + i, b + j, c + k, d + m, e + n, f + o, g + p, h + q
    added = ((a + b) + (c + d)) + ((e + f) + (g + h))
    for value in values[whole:]:
        added += value
    return added


def log(values: Any) -> Array:
    """The natural logarithm, of the shape of ``values``; of nothing it is minus infinity, and below that NaN."""
    values = np.asarray(values, float)
    if values.ndim > 1 or values.size > ONE_RUN:
        return np.asarray(np.log(values))
    numbers = values.ravel().tolist()
    try:
        found = list(map(math.log, numbers))
    except ValueError:  # some are 0 or less
        found = list(map(_log, numbers))
    return np.array(found).reshape(values.shape)


def exp(values: Array) -> Array:
    """The exponential, of the shape of ``values``."""
    if values.ndim > 1 or values.size > ONE_RUN:
        return np.asarray(np.exp(values))
    numbers = values.ravel().tolist()
    usual = values.max(initial=0.0) < LARGEST  # else some are too large, or no numbers
    found = list(map(math.exp if usual else _exp, numbers))
    return np.array(found).reshape(values.shape)


def quantile(parts: Array) -> Array:
    """Below which a standard normal variable is with these probabilities; of the shape of ``parts``, whose values are
    0 to 1/2, or NaN."""
    if parts.ndim > 1 or parts.size > ONE_RUN:
        from scipy.special import ndtri  # a fifth of a second to import, which a rank does without

        return np.asarray(ndtri(parts))
    found = [
        normal(part) if 0 < part < 1 else math.nan if part else -math.inf for part in parts.ravel().tolist()
    ]
    return np.array(found).reshape(parts.shape)


normal = NormalDist().inv_cdf
"""``quantile`` of one plain number; ValueError for 0."""


def _log(value: float) -> float:
    if value > 0:
        return math.log(value)
    return -math.inf if value == 0 else math.nan


def _exp(value: float) -> float:
    return math.exp(value) if value < LARGEST else float(np.exp(value))
