"""Rounds to TensorBoard."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from paceline.errors import PacelineError
from paceline.runs.sinks.scalars import Sink

FOLDER = "tensorboard"


@dataclass
class TensorBoard(Sink):
    """Event files of TensorBoard.

    folder: where they go; by default ``tensorboard`` in the run's directory.
    """

    folder: str = ""
    _writer: Any = field(init=False, repr=False, default=None)

    def __post_init__(self) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise PacelineError(
                "TensorBoard is not installed; run: pip install 'paceline[torch,tensorboard]'"
            ) from error
        self._writer = SummaryWriter(str(self.path))

    @property
    def path(self) -> Path:
        """The folder of the event files."""
        return Path(self.folder) if self.folder else self.place / FOLDER

    @property
    def where(self) -> str:
        return f"TensorBoard: tensorboard --logdir {self.path}"

    def close(self) -> None:
        self._writer.close()

    def _log(self, values: dict[str, float], step: int) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)
