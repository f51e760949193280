"""The options of a training run, each described once for the command line, run.json and the checks."""

# ruff: noqa: RUF009 - the calls make fields
from __future__ import annotations

import dataclasses
import types
from dataclasses import dataclass
from typing import Any, get_args, get_origin, get_type_hints

from paceline.errors import MANY, PacelineError, short

# The panels of the command's help.
DATA, BALANCING, SLOWNESS = "More on data and training", "More on balancing", "More on played slowness"
CHECKPOINTS, LOST, RAY = "Figures and checkpoints", "Workers that are lost or join", "With --engine ray"


def dashed(name: str) -> str:
    """An option's name on the command line."""
    return name.replace("_", "-")


def _option(
    default: Any,
    text: str,
    panel: str | None = None,
    least: int | None = None,
    most: int = MANY,
    form: str | None = None,
) -> Any:
    """An option. text: its help. panel: of the help; None for what matters first. least, most: the range of a whole
    number. form: what the help shows in place of a value."""
    return dataclasses.field(
        default=default,
        metadata={"help": text, "panel": panel, "least": least, "most": most, "metavar": form},
    )


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """One training run. Lists have one entry a worker.

    ``sync``, ``backup``, ``mode``, ``rate`` and ``address`` are only for the engine "ray". elastic: whether the run
    continues when workers are lost; None: if it can, see ``checks.survives``.
    """

    data: str = _option(
        "digits", "digits, a .npz file, or a directory of IDX files.", form="digits|FILE.npz|DIR"
    )
    model: str = _option("mlp", "mlp, cnn, lenet5, resnet18 or vgg16.", form="NAME")
    workers: int = _option(4, "Local worker processes (under torchrun: its own).", None, 1, 1024)
    policy: str = _option(
        "auto", "Who does how much, see below; with ray, level unless given.", form="NAME[:KEY=VALUE,...]"
    )
    global_batch: int = _option(256, "Samples per optimizer step, over all workers.", None, 1)
    epochs: int = _option(2, "Times through the training set.", None, 1)
    steps: int | None = _option(None, "Optimizer steps, instead of --epochs.", DATA, 1)
    slowdown: list[float] | None = _option(
        None,
        "Sleep so that workers differ by these factors: 1,1,1,4. Factor 1 is 1 ms a sample, or what the slowest "
        "takes by itself.",
    )
    slowdown_ms: list[float] | None = _option(
        None, "Sleep these milliseconds for each sample: 1,1,4", SLOWNESS
    )
    slowdown_trace: str | None = _option(
        None,
        "Play speeds from a CSV file: round,worker,seconds_per_sample,overhead_seconds",
        SLOWNESS,
        form="FILE.csv",
    )
    limits: list[tuple[int | None, int | None]] | str | None = _option(
        None, "Least and most samples of each worker: 1:64,1:64,:; or memory: find what fits.", BALANCING
    )
    micro_batch: int | None = _option(None, "Samples that fit into a worker's memory.", BALANCING, 1)
    quantum: int = _option(1, "Loads are multiples of this many samples.", BALANCING, 1)
    weigh: str = _option("loss", "Weight gradients through the loss, or in DDP's hook.", BALANCING)
    loop: str = _option(
        "round",
        "round, or local: each worker takes its own steps, and they are merged; this trains another model.",
        DATA,
    )
    every: str | None = _option(
        None,
        "With --loop local, interval of merges: 8 (steps), 2s, or auto, the default: by the link's speed.",
        DATA,
    )
    outer: str | None = _option(
        None,
        "With --loop local, how a merge applies the changes: mean, or nesterov:lr=0.7,momentum=0.9.",
        DATA,
    )
    loader_workers: int = _option(0, "Prefetching processes of each worker.", DATA, 0, 256)
    lr: float = _option(0.1, "Learning rate.", DATA)
    momentum: float = _option(0.9, "Momentum.", DATA)
    seed: int = _option(0, "For the weights and the order of the samples.", DATA, 0, 2**63 - 1)
    checkpoint_every: int = _option(100, "Steps between checkpoints.", CHECKPOINTS, 1)
    patience: float = _option(
        30.0,
        "Seconds without a heartbeat from a worker after which the run is ended, if it is not elastic or has not "
        "begun.",
        LOST,
    )
    elastic: bool | None = _option(
        None,
        "Continue when a worker is killed, freezes, leaves (SIGTERM) or joins, and lose no sample; default: if the "
        "run can.",
        LOST,
    )
    max_restarts: int = _option(3, "Workers started in place of lost ones.", LOST, 0)
    dead_after: float = _option(
        1.0,
        "Seconds without a heartbeat until a worker counts as lost, ten times as many for one that has work "
        "(Linux).",
        LOST,
    )
    engine: str = _option("torch", "torch (DDP), or ray (a parameter server).", RAY)
    sync: str = _option("bsp", "When parameters move: bsp, asp, ssp:10, lsp:3:5.", RAY)
    backup: str = _option("everyone", "How many gradients to wait for: everyone, static:3, dbw, ...", RAY)
    mode: str = _option("push-wait", "push-wait, push-interrupt or pull.", RAY)
    rate: str = _option("fixed", "The learning rate for k gradients: fixed, proportional, adascale.", RAY)
    address: str | None = _option(None, "HOST:PORT of a standing cluster.", RAY, form="HOST:PORT")

    def as_dict(self) -> dict[str, Any]:
        """The options as plain values, for run.json."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> TrainConfig:
        """The options in run.json, without its other entries. Raises PacelineError for values of a wrong type."""
        kinds = get_type_hints(cls)
        kept = {name: values[name] for name in kinds if name in values}
        for name, value in kept.items():
            if not _fits(value, kinds[name]):
                kind = cls.__dataclass_fields__[name].type
                raise PacelineError(
                    f"{name}={short(value)} in run.json: expected {kind}; put back the run's own file"
                )
        if isinstance(kept.get("limits"), list):
            kept["limits"] = [tuple(pair) for pair in kept["limits"]]
        return cls(**kept)

    def rounds(self, samples: int) -> int:
        """Rounds of the whole run over a training set of this size; an upper bound if their size is not fixed."""
        steps = int(self.every) if self.every is not None and self.every.isdecimal() else 1
        planned = self.epochs * -(-samples // (self.global_batch * steps))
        return planned if self.steps is None else self.steps


def _fits(value: Any, kind: Any) -> bool:
    """Whether a value from JSON can be of this type."""
    kinds = get_args(kind)
    if get_origin(kind) is types.UnionType:
        return any(_fits(value, each) for each in kinds)
    if get_origin(kind) is list:
        return isinstance(value, list) and all(_fits(each, kinds[0]) for each in value)
    if get_origin(kind) is tuple:
        return isinstance(value, list | tuple) and len(value) == len(kinds) and all(map(_fits, value, kinds))
    return type(value) is kind or (kind is float and type(value) is int)
