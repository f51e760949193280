"""Logarithms, exponentials and quantiles that are the same to the last bit on every processor.

Ranks on unlike machines must make the same plans. numpy's own logarithms and exponentials depend in their last bit on
what the processor has, so those of the C library are taken, one number after another, as far as one run is concerned:
arrays of shape (n,) or a single number. Everything else that decisions are made of is the same everywhere as it
is: sums, products, quotients and roots are rounded as IEEE 754 says, and ``sum`` along the last axis adds in
an order that depends on the number of workers alone. (Products of matrices are not: they are left out of decisions.)
"""

from __future__ import annotations

import math
from statistics import NormalDist
from typing import Any

import numpy as np

from paceline.costs import Array

__all__ = ["exp", "log", "quantile"]

ONE_RUN = 4096  # workers of one run: beyond, the time counts more than that unlike machines agree
LARGEST = 709.0  # of which the exponential is a float for certain


def log(values: Any) -> Array:
    """The natural logarithm, of the shape of ``values``; of nothing it is minus infinity, and below that NaN."""
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
    """The exponential, of the shape of ``values``."""
    if values.ndim > 1 or values.size > ONE_RUN:
        return np.asarray(np.exp(values))
    numbers = values.ravel().tolist()
    if values.max(initial=0.0) < LARGEST:
        found = list(map(math.exp, numbers))
    else:  # some are too large, or no numbers
        found = [math.exp(x) if x < LARGEST else float(np.exp(x)) for x in numbers]
    return np.array(found).reshape(values.shape)


def quantile(parts: Array) -> Array:
    """Below which a standard normal variable is with these probabilities; of the shape of ``parts``, whose values are
    0 to 1/2, or NaN."""
    if parts.ndim > 1 or parts.size > ONE_RUN:
        from scipy.special import ndtri  # a fifth of a second to import, which a rank does without

        return np.asarray(ndtri(parts))
    found = [
        _normal(part) if 0 < part < 1 else math.nan if part else -math.inf for part in parts.ravel().tolist()
    ]
    return np.array(found).reshape(parts.shape)


_normal = NormalDist().inv_cdf
