"""The record as TensorBoard scalars: while a run goes on, or afterwards from its directory.

board = Board("runs/first/tensorboard")
board.round(**fields)  # the fields that Recorder.round takes
board.close()
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np

from paceline.errors import PacelineError
from paceline.runs.run import Run

FOLDER = "tensorboard"
Values = Sequence[float | None] | np.ndarray


class Board:
    """Writes scalars, one step a round."""

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        """Raises PacelineError where TensorBoard is not installed."""
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise PacelineError(
                "TensorBoard is not installed; run: pip install 'paceline[torch,tensorboard]'"
            ) from error
        self._writer = SummaryWriter(str(folder))

    def round(
        self,
        *,
        round: int,
        seconds: float,
        batch: int,
        loads: Values,
        compute: Values,
        wait: Values | None = None,
        loss: float | None = None,
        **_: Any,
    ) -> None:
        """Add one round; what is unknown (None, NaN) is left out."""
        self._add("round/seconds", seconds, round)
        self._add("round/samples_per_second", batch / seconds if seconds > 0 else None, round)
        self._add("train/loss", loss, round)
        if wait is not None:
            idle = np.nansum(np.array(wait, float))
            self._add("round/idle_share", idle / (len(wait) * seconds) if seconds > 0 else None, round)
        for worker, (load, spent) in enumerate(zip(loads, compute, strict=True)):
            self._add(f"load/worker_{worker}", load, round)
            self._add(f"compute_seconds/worker_{worker}", spent, round)

    def close(self) -> None:
        """Write out what is still held."""
        self._writer.close()

    def _add(self, name: str, value: float | None, step: int) -> None:
        if value is not None and math.isfinite(value):
            self._writer.add_scalar(name, float(value), int(step))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def write(run: Run, folder: str | os.PathLike[str] | None = None) -> Path:
    """Write a whole record's scalars, into the run's directory unless ``folder`` says where; the folder."""
    folder = Path(folder) if folder is not None else run.path / FOLDER
    with Board(folder) as board:
        for t in range(len(run.round)):
            board.round(
                round=int(run.round[t]),
                seconds=float(run.seconds[t]),
                batch=int(run.batch[t]),
                loads=run.loads[t],
                compute=run.compute[t],
                wait=run.wait[t],
                loss=float(run.loss[t]),
            )
    return folder
