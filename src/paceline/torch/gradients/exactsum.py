"""Sums of gradients that do not depend on the order of the additions, nor on who adds what.

Each gradient is split into two whole numbers, in units of 2^-20 and 2^-72, which add without rounding. So the sum
over all ranks and pieces has the same bits whatever the order (what is below 2^-73 is rounded once for each piece,
whoever runs it). It takes 16 bytes a parameter beside the gradient, and as many through the all-reduce.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from paceline.torch import peers

COARSE, FINE = 2.0**20, 2.0**52  # units in 1, and of the second in the first: 2048 pieces cannot overflow
LARGEST = 2.0**31  # of a gradient; beyond, the sum is no number


class ExactSum:
    """Gathers the gradients of some parameters, piece after piece."""

    def __init__(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        self._parameters = list(parameters)
        self._sizes = [p.numel() for p in self._parameters]
        self._total = sum(self._sizes)
        self._sums: torch.Tensor | None = None

    def add(self) -> None:
        """Take the gradients from the parameters."""
        sums = self._gathered()
        start = 0
        for number, (p, size) in enumerate(zip(self._parameters, self._sizes, strict=True)):
            if p.grad is not None:
                coarse = p.grad.detach().double().reshape(-1) * COARSE
                wrong = ~(coarse.abs() < LARGEST * COARSE)  # NaN is wrong, too
                coarse = torch.where(wrong, 0.0, coarse)
                whole = coarse.round()
                end = start + size
                sums[start:end] += whole.long()
                sums[self._total + start : self._total + end] += ((coarse - whole) * FINE).round().long()
                sums[2 * self._total + number] += 1
                sums[-1] += wrong.sum()
                p.grad = None
            start += size

    def finish(self) -> None:
        """Give every rank's parameters the sum over all ranks. Collective."""
        sums = self._gathered()
        if peers.ranks() > 1:
            torch.distributed.all_reduce(sums)
        start, failed = 0, bool(sums[-1])
        for number, (p, size) in enumerate(zip(self._parameters, self._sizes, strict=True)):
            if sums[2 * self._total + number]:  # else nobody's pieces used it
                coarse = sums[start : start + size].double()
                fine = sums[self._total + start : self._total + start + size].double()
                grad = (coarse / COARSE + fine / (COARSE * FINE)).to(p.dtype).reshape(p.shape)
                p.grad = torch.full_like(grad, torch.nan) if failed else grad
            start += size
        self._sums = None

    def _gathered(self) -> torch.Tensor:
        if self._sums is None:
            device = self._parameters[0].device if self._parameters else "cpu"
            self._sums = torch.zeros(2 * self._total + len(self._sizes) + 1, dtype=torch.int64, device=device)
        return self._sums
