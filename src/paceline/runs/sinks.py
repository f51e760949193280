"""Sinks that send the rounds of a run elsewhere: Weights & Biases, MLflow, Trackio, TensorBoard, Prometheus.

    sinks.write(read("runs/mine"), "wandb:project=uneven")                 # a whole record, afterwards

A sink is named by text, with options as ``name:key=value,...``. All sinks get the same scalars
(``scalars``). The trackers of ``paceline.torch.callbacks`` send each round to a sink during the run.
"""

from __future__ import annotations

import contextlib
import importlib
import itertools
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from paceline import options
from paceline.commands import pip
from paceline.errors import PacelineError, saying, whole
from paceline.runs.run import Run, waiting_share, waits

__all__ = ["Sink", "create", "scalars", "write"]

Values = Sequence[float | None] | np.ndarray


def scalars(
    *, seconds: float, batch: int, loads: Values, compute: Values, loss: float | None = None, **_: Any
) -> dict[str, float]:
    """A round's scalars, without those that are unknown (None, NaN).

    The arguments are those of ``Recorder.round``; further ones are ignored.

    Args:
        seconds: Wall seconds of the round.
        batch: Samples of the round.
        loads: Samples of each worker, shape (n,).
        compute: Seconds that each worker computed, shape (n,).
        loss: Mean over the batch.
        _: Ignored.

    Returns:
        Numbers by their names in trackers. ``round/idle_share`` is the portion of the workers' time that they waited.
    """
    spent = np.array(compute, float)
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
    """Takes a run's rounds one after another; subclasses define the destination. Made by ``sinks.create``.

    Attributes:
        place: The run's directory.
        config: The run's configuration.
        where: The destination, in words for people.
    """

    place: Path
    config: dict[str, Any]
    where: str = field(init=False)

    def round(self, *, round: int, **fields: Any) -> None:
        """Send one round: its number, and the fields that ``scalars`` takes.

        Args:
            round: The round's number, from 0.
            fields: Of the round, as ``scalars`` takes them.
        """
        self._log(scalars(**fields), int(round))

    def close(self) -> None:
        """Send what is still buffered; no more rounds follow."""

    def _log(self, values: dict[str, float], step: int) -> None:
        raise NotImplementedError


def package(module: str, name: str, wanted: str) -> Any:
    """A module of a sink's package. Raises PacelineError, with the command to install it, if it is missing."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise PacelineError(f"{name} is not installed ({error}); run: {pip()} install {wanted}") from error


@dataclass
class MLflowSink(Sink):
    """A run in an experiment of MLflow.

    experiment: its name. uri: of the tracking server, or of a folder or database such as ``sqlite:///mlflow.db``;
    "" for the setting of the environment (MLFLOW_TRACKING_URI).
    """

    experiment: str = "paceline"
    uri: str = ""

    def __post_init__(self) -> None:
        self._metric = package("mlflow.entities", "MLflow", "mlflow").Metric
        self._client = package("mlflow.tracking", "MLflow", "mlflow").MlflowClient(self.uri or None)
        known = self._client.get_experiment_by_name(self.experiment)
        chosen = known.experiment_id if known else self._client.create_experiment(self.experiment)
        self._id = self._client.create_run(chosen, run_name=self.place.name).info.run_id
        for name, value in self.config.items():
            self._client.log_param(self._id, name, str(value)[:500])
        self.where = f"MLflow, experiment {self.experiment}, run {self._id}"

    def close(self) -> None:
        self._client.set_terminated(self._id)

    def _log(self, values: dict[str, float], step: int) -> None:
        now = int(time.time() * 1000)
        metrics = [self._metric(name, value, now, step) for name, value in values.items()]
        self._client.log_batch(self._id, metrics)


BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
METRICS = (  # kind, name after "paceline_", meaning; metrics of a worker have its number as a label
    ("Counter", "rounds", "Completed rounds."),
    ("Counter", "samples", "Samples trained on."),
    ("Histogram", "round_seconds", "Wall seconds of each round."),
    ("Gauge", "loss", "Mean training loss of the newest round."),
    ("Gauge", "worker_samples", "Samples of the worker in the newest round."),
    ("Gauge", "worker_seconds", "Seconds of the worker's own work in the newest round."),
    ("Counter", "worker_wait_seconds", "Seconds that the worker waited for the last worker."),
)


@dataclass
class PrometheusSink(Sink):
    """Serves metrics to Prometheus while the run continues.

    port: 0 takes any free port. host: the address to listen on; with 0.0.0.0, other machines can reach it.
    """

    port: int = 0
    host: str = "127.0.0.1"

    def __post_init__(self) -> None:
        prometheus = package("prometheus_client", "The Prometheus client", "prometheus-client")
        registry = prometheus.CollectorRegistry()
        self._metrics: dict[str, Any] = {}
        for kind, name, text in METRICS:
            labels = ["job", "worker"] if name.startswith("worker") else ["job"]
            more = {"buckets": BUCKETS} if kind == "Histogram" else {}
            made = getattr(prometheus, kind)
            self._metrics[name] = made(f"paceline_{name}", text, labels, registry=registry, **more)
        whole("metrics port", self.port, 0, 65535)
        with saying(f"cannot serve metrics on {self.host}:{self.port}", "choose another, or 0 for any"):
            self._server, self._thread = prometheus.start_http_server(self.port, self.host, registry)
        self.port = self._server.server_port
        self.where = f"Prometheus: http://{self.host}:{self.port}/metrics"

    def round(self, *, round: int, **fields: Any) -> None:
        def of(name: str, *worker: int) -> Any:
            """A metric, labelled with the name of this run as ``job``, as in the service."""
            return self._metrics[name].labels(self.place.name or "training", *worker)

        seconds, loss = float(fields["seconds"]), fields.get("loss")
        of("rounds").inc()
        of("samples").inc(fields["batch"])
        of("round_seconds").observe(seconds)
        if loss is not None and math.isfinite(loss):
            of("loss").set(loss)
        spent = np.array(fields["compute"], float)
        rows = zip(fields["loads"], spent, waits(seconds, spent), strict=True)
        for worker, (load, own, waited) in enumerate(rows):
            if math.isfinite(own):
                of("worker_samples", worker).set(load)
                of("worker_seconds", worker).set(own)
                of("worker_wait_seconds", worker).inc(waited)

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


@dataclass
class TensorBoardSink(Sink):
    """Event files of TensorBoard.

    folder: where they go; by default ``tensorboard`` in the run's directory.
    """

    folder: str = ""

    def __post_init__(self) -> None:
        self.folder = self.folder or str(self.place / "tensorboard")
        board = package("torch.utils.tensorboard", "TensorBoard", "tensorboard")
        self._writer = board.SummaryWriter(self.folder)
        self.where = f"TensorBoard: tensorboard --logdir {self.folder}"

    def close(self) -> None:
        self._writer.close()

    def _log(self, values: dict[str, float], step: int) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)


@dataclass
class TrackioSink(Sink):
    """A run in a project of Trackio, which stores it on this machine (in TRACKIO_DIR).

    project: its name; ``trackio show --project NAME`` opens it.
    """

    project: str = "paceline"

    def __post_init__(self) -> None:
        plain = {name: value for name, value in self.config.items() if not name.startswith("_")}
        self._run = package("trackio", "Trackio", "trackio").init(
            project=self.project, name=self.place.name, config=plain, embed=False
        )
        self.where = f"Trackio, project {self.project}: trackio show --project {self.project}"

    def close(self) -> None:
        self._run.finish()

    def _log(self, values: dict[str, float], step: int) -> None:
        self._run.log(values, step=step)


@dataclass
class WandbSink(TrackioSink):
    """A run in a project of Weights & Biases.

    project: its name there. mode: "online", "offline" (files below the run's directory, which ``wandb sync`` sends
    later) or "" for the setting of the environment (WANDB_MODE).
    """

    mode: str = ""

    def __post_init__(self) -> None:
        wandb = package("wandb", "Weights & Biases", "wandb")
        self.place.mkdir(parents=True, exist_ok=True)
        self._run = wandb.init(
            project=self.project,
            name=self.place.name,
            dir=str(self.place),
            mode=self.mode or None,
            config=self.config,
            settings=wandb.Settings(silent=True),
        )
        self.where = f"Weights & Biases, project {self.project}, files in {self._run.dir}"


SINKS: dict[str, type[Sink]] = {
    "mlflow": MLflowSink,
    "prometheus": PrometheusSink,
    "tensorboard": TensorBoardSink,
    "trackio": TrackioSink,
    "wandb": WandbSink,
}


def create(text: str, place: Path, config: Mapping[str, Any]) -> Sink:
    """Make the sink that ``text`` names, ready to take rounds.

    Args:
        text: The sink's name with options.
        place: The directory of the run, whose name is the run's name.
        config: The run's configuration, as in run.json.

    Returns:
        The sink.

    Raises:
        PacelineError: For an unknown name or option, and if a package is not installed.
    """
    return options.build(SINKS, text, "sink", place=place, config=dict(config))


def opened(runs: Sequence[Run], texts: Sequence[str]) -> list[tuple[Run, Sink]]:
    """Pairs of every run and each sink that ``texts`` name; if one cannot be made, the others are closed again."""
    pairs: list[tuple[Run, Sink]] = []
    with contextlib.ExitStack() as stack:
        for run, text in itertools.product(runs, texts):
            sink = create(text, run.path, run.config)
            stack.callback(sink.close)
            pairs.append((run, sink))
        stack.pop_all()
    return pairs


def write(run: Run, text: str) -> str:
    """Send a whole record to a sink.

    Args:
        run: The record, from ``read``.
        text: The sink's name with options.

    Returns:
        The destination, in words.

    Raises:
        PacelineError: As ``create``.
    """
    return send(run, create(text, run.path, run.config))


def send(run: Run, sink: Sink) -> str:
    """Send a whole record to an open sink, and close it; returns the destination in words."""
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
