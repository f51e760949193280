"""Everything that ``paceline train`` can be told, checked before any worker starts."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from paceline import policies, traces
from paceline.data import Data
from paceline.errors import PacelineError
from paceline.rounds import Cluster
from paceline.torch import models


@dataclass(frozen=True)
class TrainConfig:
    """One training run. Lists have one entry a worker.

    pace: how many times slower than the quickest each worker is made, by sleeping.
    pace_ms: milliseconds slept for each sample. pace_trace: a CSV of recorded speeds to play by sleeping.
    limits: (least, most) samples of a round. steps: rounds at most, instead of whole epochs.
    engine: "torch" (DDP), or "ray" (a parameter server), which alone knows sync, backup, mode, rate and address.
    """

    data: str = "digits"
    model: str = "mlp"
    workers: int = 4
    policy: str = "auto"
    global_batch: int = 256
    epochs: int = 2
    steps: int | None = None
    lr: float = 0.1
    momentum: float = 0.9
    seed: int = 0
    pace: list[float] | None = None
    pace_ms: list[float] | None = None
    pace_trace: str | None = None
    limits: list[tuple[int | None, int | None]] | None = None
    micro_batch: int | None = None
    quantum: int = 1
    weigh: str = "loss"
    loader_workers: int = 0
    checkpoint_every: int = 100
    tensorboard: bool = False
    engine: str = "torch"
    sync: str = "bsp"
    backup: str = "everyone"
    mode: str = "push-wait"
    rate: str = "fixed"
    address: str | None = None

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for run.json."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> TrainConfig:
        """From run.json, whose other entries are left out."""
        known = {field.name for field in dataclasses.fields(cls)}
        kept = {name: value for name, value in values.items() if name in known}
        if kept.get("limits") is not None:
            kept["limits"] = [tuple(pair) for pair in kept["limits"]]
        return cls(**kept)

    def rounds(self, samples: int) -> int:
        """Rounds of the whole run over a training set of this size."""
        planned = self.epochs * -(-samples // self.global_batch)
        return planned if self.steps is None else self.steps

    def check(self, data: Data) -> None:
        """Raise PacelineError, in one sentence, for the first thing that cannot work with this data."""
        if self.workers < 1:
            raise PacelineError(f"workers={self.workers}: expected at least 1 worker")
        for name in ("global_batch", "epochs", "steps", "quantum", "checkpoint_every", "micro_batch"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise PacelineError(f"{name.replace('_', '-')}={value}: expected at least 1")
        if not self.lr > 0 or not np.isfinite(self.lr):
            raise PacelineError(f"lr={self.lr:g}: expected a positive learning rate")
        if self.loader_workers < 0:
            raise PacelineError(f"loader-workers={self.loader_workers}: expected 0 or more")
        self._check_pace(data)
        self._check_engine()
        cluster = Cluster(self.workers, self.global_batch, *self._limit_arrays())
        policy = policies.create(self.policy, cluster)
        if policy.needs_upcoming:
            raise PacelineError(f"policy {self.policy!r} looks into the future; it only runs in simulations")
        models.create(self.model, data.shape, data.classes)

    def _check_engine(self) -> None:
        if self.engine == "ray":
            from paceline.ray.training import choices

            choices(self)
        elif self.engine != "torch":
            raise PacelineError(f"engine {self.engine!r} is unknown; expected torch or ray")
        else:
            for name in ("sync", "backup", "mode", "rate", "address"):
                if getattr(self, name) != getattr(TrainConfig, name):
                    raise PacelineError(f"--{name} is for --engine ray; add it, or leave out --{name}")

    def _check_pace(self, data: Data) -> None:
        given = [name for name in ("pace", "pace_ms", "pace_trace") if getattr(self, name) is not None]
        if len(given) > 1:
            both = " and ".join("--" + name.replace("_", "-") for name in given)
            raise PacelineError(f"{both} were both given; expected one of them")
        for name, lowest in (("pace", 1.0), ("pace_ms", 0.0)):
            values = getattr(self, name)
            if values is None:
                continue
            option = "--" + name.replace("_", "-")
            if len(values) != self.workers:
                raise PacelineError(
                    f"{option} has {len(values)} entries for {self.workers} workers; expected one for each"
                )
            for value in values:
                if not value >= lowest or not np.isfinite(value):
                    raise PacelineError(
                        f"{option} has the entry {value:g}; expected numbers of at least {lowest:g}"
                    )
        if self.pace_trace is not None:
            trace = traces.read(self.pace_trace)
            length, width = trace.seconds_per_sample.shape
            if width != self.workers:
                raise PacelineError(
                    f"{self.pace_trace} has {width} workers, the run {self.workers}; expected the same number"
                )
            rounds, takes = self.rounds(len(data.x_train)), "takes"
            one_by_one = (self.sync, self.backup) != ("bsp", "everyone")
            if self.engine == "ray" and one_by_one and self.steps is None:
                rounds, takes = rounds * self.workers, "may take"  # updates, each of one worker's gradient
            if length < rounds:
                raise PacelineError(
                    f"{self.pace_trace} has {length} rounds and the run {takes} {rounds}; shorten it with "
                    f"--steps {length}, or give a longer trace"
                )

    def _limit_arrays(self) -> tuple[Any, Any]:
        if self.limits is None:
            return np.minimum(1, self.global_batch // self.workers) * np.ones(self.workers), None
        if len(self.limits) != self.workers:
            raise PacelineError(
                f"--limits has {len(self.limits)} entries for {self.workers} workers; expected least:most for each"
            )
        least = [1 if low is None else low for low, _ in self.limits]
        most = [self.global_batch if high is None else high for _, high in self.limits]
        return np.array(least, float), np.array(most, float)


def default_run_dir(label: str) -> Path:
    """runs/LABEL, or runs/LABEL-2 and so on where it exists."""
    base = Path("runs") / label
    candidate, number = base, 1
    while candidate.exists():
        number += 1
        candidate = base.with_name(f"{label}-{number}")
    return candidate
