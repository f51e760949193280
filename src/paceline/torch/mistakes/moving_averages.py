"""Averages of the parameters that a program updates before a round's optimizer step: they differ between ranks."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

from paceline.errors import PacelineError
from paceline.torch.mistakes import Check

# Classes that average parameters, and their methods: of torch, timm, diffusers, ema-pytorch and torch-ema.
AVERAGES = (
    ("torch.optim.swa_utils", "AveragedModel", "update_parameters"),
    ("timm.utils.model_ema", "ModelEma", "update"),
    ("timm.utils.model_ema", "ModelEmaV2", "update"),
    ("timm.utils.model_ema", "ModelEmaV3", "update"),
    ("diffusers.training_utils", "EMAModel", "step"),
    ("ema_pytorch.ema_pytorch", "EMA", "update"),
    ("torch_ema.ema", "ExponentialMovingAverage", "update"),
)


class MovingAverages(Check):
    """Refuses such an update, since ranks take different numbers of micro-steps.

    unstepped: gives the number of the running round before its step is due, else None.
    """

    def __init__(self, unstepped: Callable[[], int | None]) -> None:
        self._unstepped = unstepped
        self._replaced: dict[tuple[Any, str], tuple[Any, Any]] = {}  # the original and its replacement

    def iteration(self, step: int) -> None:
        for module, kind, name in AVERAGES:
            owner = getattr(sys.modules.get(module), kind, None)
            if owner is not None and name in vars(owner) and (owner, name) not in self._replaced:
                original = vars(owner)[name]
                checked = self._checked(owner, name, original)
                self._replaced[owner, name] = original, checked
                setattr(owner, name, checked)

    def close(self) -> None:
        for (owner, name), (original, checked) in self._replaced.items():
            if vars(owner).get(name) is checked:
                setattr(owner, name, original)
        self._replaced.clear()

    def _checked(self, owner: type[Any], name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def checked(*given: Any, **named: Any) -> Any:
            if (step := self._unstepped()) is not None:
                raise PacelineError(
                    f"{owner.__name__}.{name}() was called within round {step}, before its optimizer "
                    "step; ranks take different numbers of micro-steps, so that their averages would differ: "
                    "expected it `if pace.step(optimizer):`"
                )
            return original(*given, **named)

        return checked
