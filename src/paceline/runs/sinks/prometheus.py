"""A training run's figures for Prometheus, at /metrics of a port, under the names that the service uses."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from paceline.errors import PacelineError
from paceline.runs.sinks.scalars import Sink, missing
from paceline.runs.waiting import waits

BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)


@dataclass
class Prometheus(Sink):
    """Answers scrapes while the run goes on.

    port: 0 takes any free one. host: the address to listen on; 0.0.0.0 is reached from other machines.
    """

    port: int = 0
    host: str = "127.0.0.1"
    _server: Any = field(init=False, repr=False, default=None)

    def __post_init__(self) -> None:
        try:
            import prometheus_client as prometheus
        except ImportError as error:
            raise missing("The Prometheus client", "prometheus-client", error) from error
        self._registry = prometheus.CollectorRegistry()

        def made(kind: Any, name: str, text: str, *labels: str, **options: Any) -> Any:
            return kind(f"paceline_{name}", text, ["job", *labels], registry=self._registry, **options)

        counter, gauge = prometheus.Counter, prometheus.Gauge
        self._rounds = made(counter, "rounds", "Closed rounds.")
        self._samples = made(counter, "samples", "Samples trained on.")
        self._seconds = made(
            prometheus.Histogram, "round_seconds", "Wall seconds of each round.", buckets=BUCKETS
        )
        self._loss = made(gauge, "loss", "Mean training loss of the newest round.")
        self._load = made(gauge, "worker_samples", "Samples of the worker in the newest round.", "worker")
        self._own = made(
            gauge, "worker_seconds", "Seconds of the worker's own work in the newest round.", "worker"
        )
        self._waited = made(
            counter, "worker_wait_seconds", "Seconds that the worker waited for the last one.", "worker"
        )
        if not 0 <= self.port <= 65535:
            raise PacelineError(f"metrics port {self.port}: expected 0 to 65535")
        try:
            self._server, self._thread = prometheus.start_http_server(self.port, self.host, self._registry)
        except OSError as error:
            raise PacelineError(
                f"cannot serve metrics on {self.host}:{self.port}: {error.strerror}; choose another, or 0 for any"
            ) from error
        self.port = self._server.server_port

    @property
    def where(self) -> str:
        return f"Prometheus: http://{self.host}:{self.port}/metrics"

    @property
    def job(self) -> str:
        """The run's name, as the service has names of jobs."""
        return self.place.name or "training"

    def round(self, *, round: int, **fields: Any) -> None:
        seconds, loss = float(fields["seconds"]), fields.get("loss")
        self._rounds.labels(self.job).inc()
        self._samples.labels(self.job).inc(fields["batch"])
        self._seconds.labels(self.job).observe(seconds)
        if loss is not None and math.isfinite(loss):
            self._loss.labels(self.job).set(loss)
        spent = np.array([math.nan if each is None else each for each in fields["compute"]], float)
        rows = zip(fields["loads"], spent, waits(seconds, spent), strict=True)
        for worker, (load, own, waited) in enumerate(rows):
            if math.isfinite(own):
                self._load.labels(self.job, worker).set(load)
                self._own.labels(self.job, worker).set(own)
                self._waited.labels(self.job, worker).inc(waited)

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
