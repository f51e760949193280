"""Finds models that differ between ranks, whatever in the program has made them differ.

Ranks that begin with the same parameters and step by the same sums of gradients keep the same parameters. They do not
if the program changes parameters or gradients by what its rank alone knows: its samples, losses, counts or random
numbers, or a state that a rank which has joined does not have.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence

import torch
from torch import nn

from paceline.torch import timing

PARAMETERS, ELEMENTS = 64, 16  # the most parameters that are looked at, and elements of each
APART = 1e-4  # portion of their norm by which numbers of equal parameters may differ: processors round differently


class Fingerprint:
    """One number for the contents of a model's parameters, made from some elements of some of them.

    parameters: the model's that are summed. joins: ranks may join the run.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], joins: bool) -> None:
        self._all, self._joins, self._warned = parameters, joins, False
        self._chosen: list[nn.Parameter] = []
        self._places: list[int] = []
        self._views: list[torch.Tensor] = []
        self._factors = torch.zeros(0)

    def take(self) -> torch.Tensor | float:
        """The number now: on a device a tensor that nothing has waited for. NaN without a parameter to look at."""
        if self._places != [p.data_ptr() for p in self._chosen] or not self._chosen:
            self._choose()
        if not self._views:
            return math.nan
        return torch.dot(self._elements(), self._factors)

    def compare(self, step: int, numbers: Sequence[float]) -> None:
        """Warn, once, if the ranks' numbers of round ``step`` differ by more than rounding; NaN for absent ranks."""
        known = [number for number in numbers if math.isfinite(number)]
        if self._warned or not self._views or max(known, default=0.0) == min(known, default=0.0):
            return
        apart = (max(known) - min(known)) / max(float(self._elements().norm()), 1e-30)
        eps = max(torch.finfo(each.dtype).eps for each in self._views)
        if apart <= max(APART, 16 * eps):
            return
        self._warned = True
        state = "; give a state that a rank which joins needs to pace.register()" if self._joins else ""
        warnings.warn(
            f"the ranks' models differ in round {step}, by {100 * apart:.2g} % of their norm: the program changes "
            "parameters or gradients by what one rank alone knows, such as its own samples, losses, counts or random "
            f"numbers; expected what all ranks know, such as pace.mean(loss){state}",
            RuntimeWarning,
            stacklevel=timing.level(),
        )

    def _elements(self) -> torch.Tensor:
        return torch.cat(self._views).to(torch.float64)

    def _choose(self) -> None:
        """Choose the elements: anew if a parameter has another place in memory than before."""
        fit = [p for p in self._all if _fits(p) and p.device == self._all[0].device]
        self._chosen = fit[:: -(-len(fit) // PARAMETERS) or 1]
        self._places = [p.data_ptr() for p in self._chosen]
        self._views = [p.detach().view(-1)[:: -(-p.numel() // ELEMENTS)] for p in self._chosen]
        random = torch.Generator().manual_seed(0)
        factors = 1 + torch.rand(sum(map(len, self._views)), generator=random, dtype=torch.float64)
        self._factors = factors.to(self._all[0].device) if self._views else factors


def _fits(parameter: nn.Parameter) -> bool:
    """Whether these are a parameter's own numbers, one after another, not those of a part that a rank holds."""
    plain = type(parameter) is nn.Parameter and parameter.layout is torch.strided
    return plain and parameter.is_floating_point() and parameter.is_contiguous() and parameter.numel() > 0
