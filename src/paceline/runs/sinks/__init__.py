"""Where else the rounds of a run go: Weights & Biases, MLflow, Trackio, TensorBoard, Prometheus.

    sinks.write(read("runs/mine"), "wandb:project=uneven")                 # a whole record, afterwards
    pace = Pace(ddp, 256, report_to=["mlflow:uri=file:mlruns"])            # each round as it ends, on rank 0

A sink is asked for by its name, with options as ``name:key=value,...``. Each has the same scalars (``scalars``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from paceline import options
from paceline.errors import PacelineError
from paceline.runs.run import Run
from paceline.runs.sinks.mlflow import MLflow
from paceline.runs.sinks.prometheus import Prometheus
from paceline.runs.sinks.scalars import Sink, scalars
from paceline.runs.sinks.tensorboard import TensorBoard
from paceline.runs.sinks.trackio import Trackio
from paceline.runs.sinks.wandb import WeightsAndBiases

__all__ = ["Sink", "create", "scalars", "write"]

SINKS: dict[str, type[Sink]] = {
    "mlflow": MLflow,
    "prometheus": Prometheus,
    "tensorboard": TensorBoard,
    "trackio": Trackio,
    "wandb": WeightsAndBiases,
}


def create(text: str, place: Path, config: Mapping[str, Any]) -> Sink:
    """The sink that text asks for, ready to take rounds.

    place: the directory of the run, by which the run is named; config: what the run is, as run.json has it.
    Raises PacelineError for an unknown name or option, and where a package is not installed.
    """
    return options.build(SINKS, text, "sink", place=place, config=dict(config))


def opened(runs: Sequence[Run], texts: Sequence[str]) -> list[tuple[Run, Sink]]:
    """Every run with each sink that the texts ask for; where one cannot be had, the others are closed again."""
    pairs: list[tuple[Run, Sink]] = []
    try:
        for run in runs:
            for text in texts:
                pairs.append((run, create(text, run.path, run.config)))
    except PacelineError:
        for _, sink in pairs:
            sink.close()
        raise
    return pairs


def write(run: Run, text: str) -> str:
    """Send a whole record to a sink; where it went, in words."""
    return send(run, create(text, run.path, run.config))


def send(run: Run, sink: Sink) -> str:
    """Send a whole record to an open sink, and close it; where it went, in words."""
    try:
        for t in range(len(run.round)):
            sink.round(
                round=int(run.round[t]),
                seconds=float(run.seconds[t]),
                batch=int(run.batch[t]),
                loads=run.loads[t],
                compute=run.compute[t],
                loss=float(run.loss[t]),
            )
    finally:
        sink.close()
    return sink.where
