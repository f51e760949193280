"""What to do when a loss is no number any more: training would go on in silence, and spoil all it has learned."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import numpy as np

from paceline.errors import PacelineError
from paceline.rounds import Array
from paceline.torch import peers
from paceline.torch.liveness.patience import named

OnNan = str | Callable[[int, list[int]], object]


class Finite:
    """Looks at each round's losses; the same on every rank.

    on_nan: "warn" (once, from rank 0), "raise", or a function, called on every rank with (round, ranks). Raises
    PacelineError for anything else.
    """

    def __init__(self, on_nan: OnNan = "warn") -> None:
        if not callable(on_nan) and on_nan not in ("warn", "raise"):
            raise PacelineError(f"on_nan={on_nan!r}: expected 'warn', 'raise' or a function")
        self._on_nan = on_nan
        self._warned = False

    def check(self, step: int, losses: Array, told: Array) -> None:
        """Of a round: each rank's summed loss, and 1 where it handed it in, else 0; shape (n,)."""
        ranks = np.flatnonzero((told == 1) & ~np.isfinite(losses)).tolist()
        if not ranks:
            return
        if callable(self._on_nan):
            self._on_nan(step, ranks)
            return
        words = (
            f"the loss of {named(ranks)} was not finite in round {step} ({losses[ranks[0]]:g}); lower the learning "
            "rate or look for bad values in the data"
        )
        if self._on_nan == "raise":
            raise PacelineError(words)
        if not self._warned and peers.rank() == 0:
            warnings.warn(f"{words}; training goes on (on_nan='raise' ends it)", RuntimeWarning, stacklevel=2)
        self._warned = True
