"""The costs of samples: their checked lengths, and the cost model that computes costs from lengths.

A length is any quantity that the user counts: tokens, seconds of audio, atoms. A cost is in mean samples: a sample of
the data set costs 1 on average in every model, so a worker's seconds for a cost of 1 stay comparable while the
model is learned. A round of B samples costs about B.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import ArrayLike, NDArray

from paceline.costs import Array
from paceline.errors import PacelineError

__all__ = ["CostModel", "SampleCosts"]

LARGEST = 1e100  # a length whose square is still a number


@dataclass(frozen=True)
class CostModel:
    """The cost of lengths, in mean samples.

    Attributes:
        linear: Cost of a unit of length.
        quadratic: Of a unit of its square.
        launch: Of a micro-batch beyond its samples; None while it is unknown.
        padded: A micro-batch costs its size times its longest sample.
    """

    linear: float
    quadratic: float = 0.0
    launch: float | None = None
    padded: bool = False

    def of(self, lengths: Array) -> Array:
        """Cost of each sample alone, without a launch.

        Args:
            lengths: Positive numbers of any shape.

        Returns:
            Costs in mean samples, of the shape of ``lengths``.
        """
        costs: Array = self.linear * lengths + self.quadratic * lengths**2
        return costs


@dataclass(frozen=True, eq=False)
class SampleCosts:
    """The lengths of all samples of a data set.

    Attributes:
        lengths: Float64, shape (N,), positive and finite.
    """

    lengths: Array

    @staticmethod
    def checked(values: ArrayLike, samples: int, named: str = "cost") -> SampleCosts:
        """Make the costs of a data set from its samples' lengths.

        Args:
            values: One positive number for each sample.
            samples: Number of samples.
            named: The argument's name, for messages.

        Returns:
            The costs.

        Raises:
            PacelineError: If there is not one positive, finite number for each sample.
        """
        try:
            lengths = np.array(values, dtype=float)
        except (TypeError, ValueError) as error:
            raise PacelineError(f"{named}: expected one number for each sample, but {error}") from None
        if lengths.ndim == 0:
            raise PacelineError(
                f"{named}={lengths:g}: expected one number for each sample; leave it out if all cost the same"
            )
        if lengths.ndim != 1:
            raise PacelineError(
                f"{named}: expected one number for each sample, an array of shape ({samples},); "
                f"got shape {lengths.shape}"
            )
        if len(lengths) != samples:
            raise PacelineError(
                f"{named}: got {len(lengths)} numbers for the data set's {samples} samples; expected one for each"
            )
        wrong = ~((lengths > 0) & (lengths <= LARGEST))
        if wrong.any():
            first = int(np.argmax(wrong))
            others = f", and {wrong.sum() - 1} others like it" if wrong.sum() > 1 else ""
            raise PacelineError(
                f"{named}: sample {first} has {lengths[first]:g}{others}; expected positive, finite numbers"
            )
        lengths.flags.writeable = False
        return SampleCosts(lengths)

    @cached_property
    def mean(self) -> float:
        """The mean length."""
        return float(self.lengths.mean())

    @cached_property
    def mean_square(self) -> float:
        """The mean square of a length."""
        return float((self.lengths**2).mean())

    def model(
        self, quadratic_part: float = 0.0, launch: float | None = None, padded: bool = False
    ) -> CostModel:
        """The model in which a part of the mean sample's cost grows with the square of its length.

        Args:
            quadratic_part: This part, 0 to 1.
            launch: Cost of a micro-batch beyond its samples, in mean samples.
            padded: Whether a micro-batch is padded to its longest sample.

        Returns:
            A model in which the mean sample costs 1.
        """
        linear, quadratic = (1 - quadratic_part) / self.mean, quadratic_part / self.mean_square
        return CostModel(linear, quadratic, launch, padded)

    def with_alpha(self, alpha: float, launch: float | None = None, padded: bool = False) -> CostModel:
        """The model in which a sample costs in proportion to L + alpha L^2.

        Args:
            alpha: Weight of the square of a length.
            launch: Cost of a micro-batch beyond its samples, in mean samples.
            padded: Whether a micro-batch is padded to its longest sample.

        Returns:
            A model in which the mean sample costs 1.
        """
        linear = 1.0 / (self.mean + alpha * self.mean_square)
        return CostModel(linear, alpha * linear, launch, padded)


def batch_parts(lengths: Array, sizes: NDArray[np.int64], padded: bool) -> Array:
    """The sums (linear, quadratic, launches) over micro-batches; their product with the model's numbers is the cost.

    lengths: of the samples, micro-batch after micro-batch. sizes: samples of each micro-batch; none is empty.
    """
    if not len(sizes):
        return np.zeros(3)
    if padded:
        longest = np.maximum.reduceat(lengths, np.cumsum(sizes) - sizes)
        return np.array([(sizes * longest).sum(), (sizes * longest**2).sum(), len(sizes)])
    return np.array([lengths.sum(), (lengths**2).sum(), len(sizes)])


def cost_of(model: CostModel, parts: Array) -> Array:
    """Costs of parts, (..., 3), see ``batch_parts``, in mean samples; an unknown launch costs nothing."""
    # Not a product of matrices, which would have other bits on other machines.
    costs: Array = (
        parts[..., 0] * model.linear + parts[..., 1] * model.quadratic + parts[..., 2] * (model.launch or 0.0)
    )
    return costs
