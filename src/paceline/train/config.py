"""Everything that ``paceline train`` can be told, checked before any worker starts."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import numpy as np

from paceline import policies
from paceline.balancer import Balancer
from paceline.data import traces
from paceline.data.datasets import Data
from paceline.errors import PacelineError, meant, short
from paceline.learners import models
from paceline.paramserver.config import ServerConfig
from paceline.rounds import Cluster
from paceline.torch import options
from paceline.torch.liveness import stall

MANY = 2**31 - 1
# Whole numbers, None excepted: the least and the most that each option may be.
WHOLE = {
    "workers": (1, 1024),
    "global_batch": (1, MANY),
    "epochs": (1, MANY),
    "steps": (1, MANY),
    "micro_batch": (1, MANY),
    "quantum": (1, MANY),
    "checkpoint_every": (1, MANY),
    "loader_workers": (0, 256),
    "seed": (0, 2**63 - 1),
    "max_restarts": (0, MANY),
}
SLOWEST = 1e6  # milliseconds a sample, or times as slow
# What run.json of earlier versions calls some fields.
EARLIER = {"pace": "slowdown", "pace_ms": "slowdown_ms", "pace_trace": "slowdown_trace"}


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """One training run. Lists have one entry a worker.

    slowdown: how many times slower than the quickest each worker is made, by sleeping.
    slowdown_ms: milliseconds slept for each sample. slowdown_trace: a CSV of recorded speeds to play by sleeping.
    limits: (least, most) samples of a round. steps: rounds at most, instead of whole epochs.
    engine: "torch" (DDP), or "ray" (a parameter server), which alone knows sync, backup, mode, rate and address.
    patience: seconds without a sign of life after which the run is ended, see ``paceline.torch.Pace``.
    elastic: whether the run goes on when a worker is killed, freezes, leaves or joins; None where it can, see
    ``lasting``. max_restarts: how many are started in place of lost ones; dead_after: seconds without a sign of life
    after which one counts as lost.
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
    slowdown: list[float] | None = None
    slowdown_ms: list[float] | None = None
    slowdown_trace: str | None = None
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
    patience: float = stall.SECONDS
    elastic: bool | None = None
    max_restarts: int = 3
    dead_after: float = 1.0

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for run.json."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> TrainConfig:
        """From run.json, whose other entries are left out. Raises PacelineError for what no option can be."""
        values = {EARLIER.get(name, name): value for name, value in values.items()}
        kept = {}
        for field in dataclasses.fields(cls):
            if field.name in values:
                value = values[field.name]
                if not _fits(value, str(field.type)):
                    raise PacelineError(
                        f"{field.name}={short(value)} in run.json: expected {field.type}; put back the run's own file"
                    )
                kept[field.name] = value
        if kept.get("limits") is not None:
            kept["limits"] = [tuple(pair) for pair in kept["limits"]]
        return cls(**kept)

    def rounds(self, samples: int) -> int:
        """Rounds of the whole run over a training set of this size."""
        planned = self.epochs * -(-samples // self.global_batch)
        return planned if self.steps is None else self.steps

    def check(self, data: Data) -> None:
        """Raise PacelineError, in one sentence, for the first thing that cannot work with this data."""
        for name, (least, most) in WHOLE.items():
            value = getattr(self, name)
            if value is not None and not least <= value <= most:
                raise PacelineError(f"{name.replace('_', '-')}={value}: expected {least} to {most:,}")
        if not self.lr > 0 or not np.isfinite(self.lr):
            raise PacelineError(f"lr={self.lr:g}: expected a positive learning rate")
        if not 0 <= self.momentum < 1:
            raise PacelineError(f"momentum={self.momentum:g}: expected 0 or more, and less than 1")
        options.check_weigh(self.weigh, None)
        stall.check(self.patience)
        self._check_slowdown(data)
        model = models.create(self.model, data.shape, data.classes)
        floor = 2 if options.has_batch_norm(model) else 1
        cluster = Cluster(self.workers, self.global_batch, *self._limit_arrays(floor))
        Balancer(policies.create(self.policy, cluster), quantum=self.quantum, floor=floor)
        if self.micro_batch is not None and self.micro_batch < 2 * floor - 1:
            raise PacelineError(
                f"micro-batch={self.micro_batch}: expected at least {2 * floor - 1}: {self.model} has batch norm"
            )
        self._check_engine()

    def server(self) -> ServerConfig:
        """What the parameter server goes by. Raises PacelineError for what is unknown or excludes something else."""
        limits = None if self.limits is None else tuple(self.limits)
        return ServerConfig(
            self.workers,
            self.global_batch,
            sync=self.sync,
            mode=self.mode,
            backup=self.backup,
            policy=self.policy,
            rate=self.rate,
            lr=self.lr,
            momentum=self.momentum,
            limits=limits,
        )

    def _check_engine(self) -> None:
        if self.engine == "ray":
            import paceline.ray  # noqa: F401 - which says so where Ray is not installed

            self.server().build(shared=True)
            if self.patience != TrainConfig.patience:
                raise PacelineError("--patience is for --engine torch; leave it out with --engine ray")
        elif self.engine != "torch":
            raise PacelineError(
                f"engine {self.engine!r} is unknown; expected torch or ray{meant(self.engine, ('torch', 'ray'))}"
            )
        else:
            for name in ("sync", "backup", "mode", "rate", "address"):
                if getattr(self, name) != getattr(TrainConfig, name):
                    raise PacelineError(f"--{name} is for --engine ray; add it, or leave out --{name}")

    def _check_slowdown(self, data: Data) -> None:
        given = [
            name for name in ("slowdown", "slowdown_ms", "slowdown_trace") if getattr(self, name) is not None
        ]
        if len(given) > 1:
            both = " and ".join("--" + name.replace("_", "-") for name in given)
            raise PacelineError(f"{both} were both given; expected one of them")
        for name, lowest in (("slowdown", 1.0), ("slowdown_ms", 0.0)):
            values = getattr(self, name)
            if values is None:
                continue
            option = "--" + name.replace("_", "-")
            if len(values) != self.workers:
                raise PacelineError(
                    f"{option} has {len(values)} entries for {self.workers} workers; expected one for each"
                )
            for value in values:
                if not lowest <= value <= SLOWEST:
                    raise PacelineError(
                        f"{option} has the entry {value:g}; expected numbers of at least {lowest:g}, and at most "
                        f"{SLOWEST:g}"
                    )
        if self.slowdown_trace is not None:
            trace = traces.read(self.slowdown_trace)
            length, width = trace.seconds_per_sample.shape
            if width != self.workers:
                raise PacelineError(
                    f"{self.slowdown_trace} has {width} workers, the run {self.workers}; expected the same number"
                )
            rounds, takes = self.rounds(len(data.x_train)), "takes"
            one_by_one = (self.sync, self.backup) != ("bsp", "everyone")
            if self.engine == "ray" and one_by_one and self.steps is None:
                rounds, takes = rounds * self.workers, "may take"  # updates, each of one worker's gradient
            if length < rounds:
                raise PacelineError(
                    f"{self.slowdown_trace} has {length} rounds and the run {takes} {rounds}; shorten it with "
                    f"--steps {length}, or give a longer trace"
                )

    def _limit_arrays(self, floor: int) -> tuple[Any, Any]:
        """Least and most samples of each worker, which run at least ``floor`` if any."""
        if self.limits is not None and len(self.limits) != self.workers:
            raise PacelineError(
                f"--limits has {len(self.limits)} entries for {self.workers} workers; expected least:most for each"
            )
        least, most = options.least_and_most(self.limits, self.workers, self.global_batch, floor)
        return np.array(least, float), np.array(most, float)


def _fits(value: Any, kind: str) -> bool:
    """Whether a value that JSON held can be what a field's annotation says."""
    if value is None:
        return "None" in kind.split(" | ")
    if kind.startswith("list[tuple["):
        return isinstance(value, list) and all(
            isinstance(pair, list | tuple)
            and len(pair) == 2
            and all(_fits(end, "int | None") for end in pair)
            for pair in value
        )
    if kind.startswith("list[float]"):
        return isinstance(value, list) and all(_fits(each, "float") for each in value)
    kinds: dict[str, Any] = {"int": int, "float": (int, float), "str": str, "bool": bool}
    kind = kind.split(" | ")[0]
    return isinstance(value, kinds[kind]) and isinstance(value, bool) == (kind == "bool")
