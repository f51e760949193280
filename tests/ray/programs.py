"""Programs for the workers of the tests: a quadratic, exact in float64."""

from __future__ import annotations

import numpy as np

X = np.random.default_rng(0).normal(1.0, 1.0, (600, 3))


def quadratic(worker):
    def gradient(values, samples):
        x = X[samples]
        return values - x.mean(0), float(((values - x) ** 2).sum(1).mean() / 2)

    return np.zeros(3), gradient


def lowered(worker):
    """The same with a loss that is 2 less: positive at first, and below 0 at the end."""
    start, above = quadratic(worker)

    def gradient(values, samples):
        found, loss = above(values, samples)
        return found, loss - 2.0

    return start, gradient


COPIES = 10_000


def wide(worker):
    """The same, many times over: a gradient too large for a message."""
    _, narrow = quadratic(worker)

    def gradient(values, samples):
        mean, loss = narrow(values[:3], samples)
        return np.tile(mean, COPIES), loss

    return np.zeros(3 * COPIES), gradient


class Slowed:
    """Sleeps a fixed time a task, one entry a worker, and now and then more."""

    def __init__(self, seconds, stall=0.0):
        self.seconds, self.stall = seconds, stall

    def __call__(self, worker, update, samples):
        rng = np.random.default_rng((worker, update))
        return self.seconds[worker] + self.stall * rng.exponential()
