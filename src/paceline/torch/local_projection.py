"""Whether the ranks of local steps have the same parameters, by one number for each rank."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from paceline.errors import PacelineError

APART = 1e-5  # portion of their norm by which the projections of equal parameters may differ through rounding
COLUMNS = 1024  # elements of a tensor whose random numbers have a common factor


class Projection:
    """One number for the contents of the parameters: the sum of their elements, each times the random number of its
    place, which is the same on every rank. If parameters differ only by rounding, so do their numbers; if elements,
    signs or places differ, the numbers differ by about as much.

    An element's random number is the product of its tensor's, its row's and its column's, so few need to be kept."""

    def __init__(self, parameters: Sequence[torch.Tensor]) -> None:
        rows = max((p.numel() for p in parameters), default=0) // COLUMNS + 1
        random = torch.Generator().manual_seed(0)
        self._columns, self._rows, self._each = (
            1 + torch.rand(many, generator=random, dtype=torch.float64)
            for many in (COLUMNS, rows, len(parameters))
        )
        # Parameters of low precision have larger rounding errors.
        self._apart = max([APART, *(torch.finfo(p.dtype).eps for p in parameters if p.is_floating_point())])

    def of(self, parameters: Sequence[torch.Tensor]) -> tuple[float, float]:
        """The number, and the norm of all elements."""
        total = square = 0.0
        for parameter, factor in zip(parameters, self._each.tolist(), strict=True):
            wide = parameter.flatten() if parameter.dtype == torch.float64 else parameter.flatten().float()
            rows, rest = divmod(len(wide), COLUMNS)
            columns, weights = self._columns.to(wide), self._rows[: rows + 1].to(wide)
            sums = wide[: rows * COLUMNS].view(rows, COLUMNS) @ columns
            last = wide[rows * COLUMNS :] @ columns[:rest]
            total += factor * float(weights[:rows] @ sums + weights[rows] * last)
            square += float(torch.linalg.vector_norm(wide, dtype=torch.float64)) ** 2
        return total, square**0.5

    def check_alike(
        self, step: int, present: torch.Tensor, projected: torch.Tensor, norms: torch.Tensor
    ) -> None:
        """Raises PacelineError if some ranks began the interval with parameters that differ from most ranks'."""
        usual, norm = projected[present].nanquantile(0.5), norms[present].nanquantile(0.5)
        alike = (projected - usual).abs() <= self._apart * norm
        apart = present & ~alike & ~usual.isnan()  # NaN on all ranks is reported elsewhere
        if apart.any():
            ranks = ", ".join(map(str, apart.nonzero().flatten().tolist()))
            raise PacelineError(
                f"interval {step} began with other parameters on rank {ranks}; expected the same on all: load "
                "checkpoints on every rank, and change parameters in the same way on all ranks"
            )
