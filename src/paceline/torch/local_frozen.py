"""The parameters that local steps do not train: no merge averages them, so no interval may change them."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from paceline.errors import PacelineError
from paceline.torch.local_projection import Projection

WHOLE = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by the bytes of an element


class Frozen:
    """Those of a model's named ``parameters`` that require no gradient. For an interval call ``begin``, and at its
    end ``row``.

    They may be many, as those of a pretrained backbone, so that they are looked at and not sent."""

    def __init__(self, parameters: Mapping[str, torch.nn.Parameter]) -> None:
        self._values = {name: p for name, p in parameters.items() if not p.requires_grad}
        self._before: dict[str, int] = {}
        self._projection = Projection([*self._values.values()])
        self._projected: tuple[float, ...] = ()

    def begin(self) -> None:
        """An interval begins."""
        now = self._bits()
        if now != self._before:
            self._before, self._projected = (
                now,
                self._projection.of([p.detach() for p in self._values.values()]),
            )

    def row(self) -> tuple[float, ...]:
        """This rank's numbers for ``check_alike``; none without such parameters. Raises PacelineError for a parameter
        that has changed since the interval began."""
        now = self._bits()
        for name, before in self._before.items():
            if now[name] != before:
                raise PacelineError(
                    f"LocalSGD: parameter {name} requires no gradient and was changed within an interval, and only "
                    "trained parameters and buffers are merged; change it `if pace.merged`, in the same way on all "
                    "ranks, or register it as a buffer, which is averaged"
                )
        return self._projected

    def check_alike(self, step: int, present: torch.Tensor, rows: torch.Tensor) -> None:
        """Raises PacelineError if interval ``step`` began with others on some ranks. rows: of all ranks, (n, 2)."""
        if self._projected:
            self._projection.check_alike(step, present, rows[:, 0], rows[:, 1])

    def _bits(self) -> dict[str, int]:
        """For each parameter the sum of its elements' bits, as whole numbers: exact in any order."""
        return {
            name: int(value.detach().view(WHOLE[value.element_size()]).sum(dtype=torch.int64))
            for name, value in self._values.items()
        }
