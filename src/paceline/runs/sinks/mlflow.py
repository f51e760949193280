"""Rounds to MLflow."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

from paceline.runs.sinks.scalars import Sink, missing


@dataclass
class MLflow(Sink):
    """A run in an experiment of MLflow.

    experiment: its name. uri: of the tracking server, or of a folder or database such as ``sqlite:///mlflow.db``;
    "" for what the environment says (MLFLOW_TRACKING_URI).
    """

    experiment: str = "paceline"
    uri: str = ""
    _client: Any = field(init=False, repr=False, default=None)
    _id: str = field(init=False, repr=False, default="")

    def __post_init__(self) -> None:
        try:
            from mlflow.entities import Metric
            from mlflow.tracking import MlflowClient
        except ImportError as error:
            raise missing("MLflow", "mlflow", error) from error
        self._metric = Metric
        self._client = MlflowClient(self.uri or None)
        known = self._client.get_experiment_by_name(self.experiment)
        chosen = known.experiment_id if known else self._client.create_experiment(self.experiment)
        run = self._client.create_run(chosen, run_name=self.place.name)
        self._id = run.info.run_id
        for name, value in self.config.items():
            self._client.log_param(self._id, name, str(value)[:500])

    @property
    def where(self) -> str:
        return f"MLflow, experiment {self.experiment}, run {self._id}"

    def close(self) -> None:
        self._client.set_terminated(self._id)

    def _log(self, values: dict[str, float], step: int) -> None:
        now = int(time.time() * 1000)
        self._client.log_batch(
            self._id, [self._metric(name, value, now, step) for name, value in values.items()]
        )
