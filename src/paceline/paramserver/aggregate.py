"""The step from the workers' gradients: their mean, weighted by samples, with the statistics that policies need."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from paceline.rounds import Vector

# Numbers of a vector whose squares are added in single precision; so few that they are still in the processor's cache
# when they are read for the second time.
CHUNK = 1 << 16


class WorkerGradient(NamedTuple):
    """One worker's gradient and loss, both means over its samples."""

    gradient: Vector
    loss: float
    samples: int
    weight: float = 1.0


class Aggregate(NamedTuple):
    """step: the parameters move by minus the learning rate times this vector (DBW, eq. (4)).

    loss: mean over the samples. norm2: squared norm of the mean gradient. variance: unbiased estimate of the summed
    variance of one gradient over an average number of samples; NaN for a single gradient.
    """

    step: Vector
    loss: float
    norm2: float
    variance: float


class Sum:
    """A sum of gradients that are added one by one as they arrive, in memory that is reused for the next update.

    statistics: also estimate the variance, from the norm of each gradient that is added.
    Floating-point sums depend on the order: for the same bits, add in the same order.
    """

    def __init__(self, statistics: bool = True) -> None:
        self._statistics = statistics
        self._total: Vector | None = None
        self._parts: list[tuple[int, float, float, float]] = []  # samples, weight, loss, norm2

    def add(self, part: WorkerGradient) -> None:
        """Add one more gradient, each of whose samples has the part's weight."""
        gradient, weight = part.gradient, part.samples * part.weight
        if self._total is None or self._total.shape != gradient.shape:
            self._total = np.empty_like(gradient, order="C")
        ratio = weight / self._parts[0][1] if self._parts else 1.0  # in units of the first part's weight
        norm2 = 0.0
        for chunk in _chunks(len(gradient)) if self._statistics else [slice(None)]:
            new, total = gradient[chunk], self._total[chunk]
            if not self._parts:
                np.copyto(total, new)
            elif ratio == 1.0:
                total += new
            else:
                axpy(total, new, ratio)
            norm2 += float(np.dot(new, new)) if self._statistics else np.nan
        self._parts.append((part.samples, weight, part.loss, norm2))

    def take(self, batch: float | None = None) -> Aggregate:
        """The aggregate of the added gradients; the next gradient begins a new sum. batch: as in ``aggregate``. The
        step is in this sum's own memory, and is valid until then."""
        assert self._total is not None
        samples, weights, losses, norms = np.array(self._parts, float).T
        unit, total, count = float(weights[0]), self._total, len(self._parts)
        self._parts = []
        mean = unit / float(weights.sum())  # the mean is the total times this factor
        scale = mean if batch is None else unit / batch
        squares = 0.0
        for chunk in _chunks(len(total)):
            part = total[chunk]
            squares += float(np.dot(part, part))
            if scale != 1.0:
                np.multiply(part, part.dtype.type(scale), out=part)
        norm2 = squares * mean**2
        variance = np.nan
        if self._statistics and count > 1:
            # The weighted variance about the weighted mean, of a gradient over an average number of samples.
            spread = max(float(weights @ norms) / float(weights.sum()) - norm2, 0.0)
            variance = spread * count / (count - 1)
        loss = float(np.average(losses, weights=samples))
        return Aggregate(total, loss, norm2, float(variance))

    def clear(self) -> None:
        """Discard the gradients that were added."""
        self._parts = []


def aggregate(parts: Sequence[WorkerGradient], batch: float | None = None) -> Aggregate:
    """The parts' mean, with its part's weight for each sample (LB-BSP, eq. (8), Alg. 1, server; WLBS, eqs. (6), (7)).

    batch: divide the weighted sum by this number of samples instead of the weighted samples of the parts.
    Parts are added in the given order, which should not depend on their arrival.
    """
    total = Sum()
    for part in parts:
        total.add(part)
    return total.take(batch)


class Parameters:
    """A parameter vector under SGD with momentum, as in torch.optim.SGD.

    in_place: change the array ``values``; otherwise each update makes a new array, so that readers of the old one are
        not disturbed. LB-BSP, eqs. (1), (2); WLBS, eqs. (1) to (3); DBW, eq. (3).
    """

    def __init__(self, values: Vector, momentum: float = 0.0, in_place: bool = False) -> None:
        self.values, self.momentum = values, momentum
        self.velocity: Vector | None = None
        self._in_place = in_place

    def move(self, step: Vector, rate: float) -> None:
        """One update."""
        if self.momentum:
            if self.velocity is None:
                self.velocity = step.copy()
            else:
                self.velocity *= step.dtype.type(self.momentum)
                self.velocity += step
            step = self.velocity
        if not self._in_place:
            self.values = self.values.copy()
        axpy(self.values, step, -rate)


def axpy(total: Vector, more: Vector, factor: float) -> None:
    """total += factor * more, in place and in one pass over memory."""
    # This import takes longer than all other imports of a worker, and workers seldom add.
    from scipy.linalg import blas

    if total.size:
        one_pass = blas.saxpy if total.dtype.char == "f" else blas.daxpy
        one_pass(np.ascontiguousarray(more, total.dtype), total, a=factor)


def _chunks(size: int) -> Iterator[slice]:
    """Slices of CHUNK numbers of a vector of this size; the last one may be smaller."""
    return (slice(start, start + CHUNK) for start in range(0, size, CHUNK))
