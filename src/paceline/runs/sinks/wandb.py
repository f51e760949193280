"""Rounds to Weights & Biases."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from paceline.runs.sinks.scalars import Sink, missing


@dataclass
class WeightsAndBiases(Sink):
    """A run in a project of Weights & Biases.

    project: its name there. mode: "online", "offline" (files below the run's directory, which ``wandb sync`` sends
    later) or "" for what the environment says (WANDB_MODE).
    """

    project: str = "paceline"
    mode: str = ""
    _run: Any = field(init=False, repr=False, default=None)

    def __post_init__(self) -> None:
        try:
            import wandb
        except ImportError as error:
            raise missing("Weights & Biases", "wandb", error) from error
        self.place.mkdir(parents=True, exist_ok=True)
        self._run = wandb.init(
            project=self.project,
            name=self.place.name,
            dir=str(self.place),
            mode=self.mode or None,
            config=self.config,
            settings=wandb.Settings(silent=True),
        )

    @property
    def where(self) -> str:
        return f"Weights & Biases, project {self.project}, files in {self._run.dir}"

    def close(self) -> None:
        self._run.finish()

    def _log(self, values: dict[str, float], step: int) -> None:
        self._run.log(values, step=step)
