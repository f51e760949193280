"""Prometheus metrics: what the service does, and what its jobs' workers do."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from paceline.serve.effects import Closed, Effect
from paceline.serve.service import Service

NAMED = (
    1000  # workers that have figures of their own, over all jobs: beyond, a scrape would hold up everybody
)
BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)


class Metrics:
    """Watches one service; ``text`` is what a scrape gets."""

    def __init__(self, service: Service) -> None:
        self._registry, self._running = CollectorRegistry(), service.catalog.running
        self._registry.register(_Jobs(service))
        self._answers = Histogram(
            "paceline_answer_seconds",
            "From a request to its answer, its wait for a plan included.",
            ["route"],
            registry=self._registry,
            buckets=BUCKETS,
        )
        self._rounds = Histogram(
            "paceline_round_seconds",
            "Wall seconds of each round.",
            ["job"],
            registry=self._registry,
            buckets=BUCKETS,
        )
        self._timed: set[str] = set()  # jobs whose rounds were
        service.door.observers.append(self._observe)

    def answered(self, route: str, seconds: float) -> None:
        """A request was answered."""
        self._answers.labels(route).observe(seconds)

    def text(self) -> bytes:
        """All of them, in Prometheus' text format."""
        self._forget_ended()
        return generate_latest(self._registry)

    def _observe(self, job: str, effect: Effect) -> None:
        if isinstance(effect, Closed):
            if job not in self._timed:
                self._forget_ended()
                self._timed.add(job)
            self._rounds.labels(job).observe(effect.seconds)

    def _forget_ended(self) -> None:
        """A job that has been deleted, or set aside, leaves no figures behind."""
        for job in self._timed - self._running.keys():
            self._rounds.remove(job)
            self._timed.discard(job)


class _Jobs(Collector):
    """The jobs' figures, read when somebody asks."""

    def __init__(self, service: Service) -> None:
        self._service = service

    def collect(self) -> Iterator[Metric]:
        def counter(name: str, text: str, *labels: str) -> CounterMetricFamily:
            return CounterMetricFamily(f"paceline_{name}", text, labels=["job", *labels])

        def gauge(name: str, text: str, *labels: str) -> GaugeMetricFamily:
            return GaugeMetricFamily(f"paceline_{name}", text, labels=["job", *labels])

        rounds, reports = counter("rounds", "Closed rounds."), counter("reports", "Reports of all workers.")
        samples, dropped = (
            counter("samples", "Samples reported."),
            counter("dropped", "Workers dropped for silence."),
        )
        present = gauge("workers_present", "Workers that take part now.")
        deadline = gauge("deadline_seconds", "Silence after which a worker is dropped.")
        load = gauge("worker_samples", "Samples in the worker's newest report.", "worker")
        seconds = gauge("worker_seconds", "Seconds in the worker's newest report.", "worker")
        named = 0
        for name, served in self._service.catalog.running.items():
            job = served.job
            for family, value in (
                (rounds, job.closed),
                (reports, job.reports),
                (samples, job.samples),
                (dropped, job.drops),
                (present, job.members.count),
                (deadline, job.limit()),
            ):
                family.add_metric([name], value)
            named += job.members.count
            for member in job.members.by_name.values() if named <= NAMED else ():
                if member.last is not None and member.present:
                    load.add_metric([name, member.name], member.last.samples)
                    seconds.add_metric([name, member.name], member.last.seconds)
        aside = GaugeMetricFamily("paceline_jobs_set_aside", "Jobs that cannot go on.")
        aside.add_metric([], len(self._service.catalog.aside))
        yield from (rounds, reports, samples, dropped, present, deadline, load, seconds, aside)
