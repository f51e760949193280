"""What every sink is told of a round, and what a sink is."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from paceline.errors import PacelineError
from paceline.runs.waiting import waiting_share

Values = Sequence[float | None] | np.ndarray


def scalars(
    *, seconds: float, batch: int, loads: Values, compute: Values, loss: float | None = None, **_: Any
) -> dict[str, float]:
    """A round's scalars by their names; what is unknown (None, NaN) is left out.

    Arguments as ``Recorder.round`` takes them. idle_share: portion of the workers' time spent waiting in this round.
    """
    spent = np.array([math.nan if each is None else each for each in compute], float)
    found: dict[str, float | None] = {
        "round/seconds": seconds,
        "round/samples_per_second": batch / seconds if seconds > 0 else None,
        "round/idle_share": waiting_share([seconds], spent[None]),
        "train/loss": loss,
    }
    for worker, (load, own) in enumerate(zip(loads, spent, strict=True)):
        found[f"load/worker_{worker}"] = load
        found[f"compute_seconds/worker_{worker}"] = own
    return {name: float(value) for name, value in found.items() if value is not None and math.isfinite(value)}


@dataclass
class Sink:
    """Takes a run's rounds one after another; subclasses say where to. Made by ``sinks.create``.

    place: the run's directory. config: what the run is.
    """

    place: Path
    config: dict[str, Any]

    @property
    def where(self) -> str:
        """Where the rounds go, for people."""
        return type(self).__name__

    def round(self, *, round: int, **fields: Any) -> None:
        """Add one round: its number, and the fields that ``scalars`` takes."""
        self._log(scalars(**fields), int(round))

    def close(self) -> None:
        """Send what is still held; no more rounds follow."""

    def _log(self, values: dict[str, float], step: int) -> None:
        raise NotImplementedError


def missing(name: str, package: str, error: ImportError) -> PacelineError:
    """The error where a sink's package is not there."""
    return PacelineError(f"{name} is not installed ({error}); run: pip install {package}")
