"""Checks of a run's options before any worker starts, and whether the run can continue without a lost worker."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from paceline import policies
from paceline.balancer import Balancer
from paceline.data import traces
from paceline.data.datasets import Data
from paceline.errors import PacelineError, expected, number
from paceline.learners import models
from paceline.paramserver.config import ServerConfig
from paceline.rounds import Cluster
from paceline.sync import intervals
from paceline.torch import options
from paceline.torch.liveness import stall
from paceline.train.config import TrainConfig, dashed

ENGINES, LOOPS = ("torch", "ray"), ("round", "local")
SLOWEST = 1e6  # milliseconds per sample, or factor
LEAST_SECONDS = 0.2  # of --dead-after: workers send a heartbeat every 0.1 s


def check(config: TrainConfig, data: Data) -> None:
    """Raise PacelineError, in one sentence, for the first option that cannot work with this data."""
    for field in dataclasses.fields(config):
        value, least, most = getattr(config, field.name), field.metadata["least"], field.metadata["most"]
        if value is not None and least is not None and not least <= value <= most:
            raise PacelineError(f"{dashed(field.name)}={value}: expected {least} to {most:,}")
    number("lr", config.lr, "a positive learning rate that is finite", lambda lr: 0 < lr < np.inf)
    number("momentum", config.momentum, "0 or more, and less than 1", lambda momentum: 0 <= momentum < 1)
    options.check_weigh(config.weigh)
    stall.check(config.patience)
    _check_loop(config)
    _check_slowdown(config, data)
    model = models.create(config.model, data.shape, data.classes)
    min_samples = options.min_samples_of(model)
    cluster = Cluster(config.workers, config.global_batch, *_limits(config, min_samples))
    Balancer(policies.create(config.policy, cluster), quantum=config.quantum, min_samples=min_samples)
    if config.micro_batch is not None and config.micro_batch < 2 * min_samples - 1:
        raise PacelineError(
            f"micro-batch={config.micro_batch}: expected at least {2 * min_samples - 1}: {config.model} has batch "
            "norm"
        )
    _check_engine(config, min_samples)


def server(config: TrainConfig, min_samples: int = 1) -> ServerConfig:
    """The parameter server's options. min_samples: the least load of workers without limits, 2 for batch norm.

    Raises PacelineError for unknown options and for those that exclude others.
    """
    pairs = config.limits if isinstance(config.limits, list) else [(None, None)] * config.workers
    limits = tuple((min_samples if low is None else low, high) for low, high in pairs)
    names = ("sync", "mode", "backup", "policy", "rate", "lr", "momentum")
    same: dict[str, Any] = {name: getattr(config, name) for name in names}
    return ServerConfig(config.workers, config.global_batch, limits=limits, **same)


def survives(config: TrainConfig, joined: bool = False) -> bool:
    """Whether the run continues without a lost worker. joined: another launcher has started the workers.

    Without an option of the user, it does if it can and there is more than one worker. Raises PacelineError if the
    user asked for it and it cannot.
    """
    wrong = hindrance(config, joined)
    if config.elastic and wrong:
        raise PacelineError(f"--elastic is not possible here: {wrong}")
    least = f"at least {LEAST_SECONDS:g} seconds, and a finite number"
    number("--dead-after", config.dead_after, least, lambda seconds: LEAST_SECONDS <= seconds < np.inf)
    if config.elastic is None:
        return not wrong and config.workers > 1
    return config.elastic


def warning(config: TrainConfig, joined: bool = False) -> str:
    """A sentence on why a lost worker ends the run, if the user gave no option for it; else empty."""
    asked = config.elastic is not None or config.workers == 1 or config.engine != "torch"
    wrong = "" if asked else hindrance(config, joined)
    return f"A worker that is lost ends this run: {wrong}." if wrong else ""


def hindrance(config: TrainConfig, joined: bool = False) -> str:
    """The reason why the run cannot continue without a lost worker; empty if it can."""
    if config.engine != "torch":
        return "with --engine ray, a run continues without lost workers by itself"
    if joined:
        return "torchrun has started its workers, and not the command itself"
    if config.weigh != "loss":
        return f"--weigh {config.weigh} leaves the sum to DDP, which needs every worker"
    if policies.create(config.policy, Cluster(config.workers, config.global_batch)).trains:
        return f"{config.policy} trains beside the rounds, and its learned state cannot be handed over"
    return ""


def _check_engine(config: TrainConfig, min_samples: int) -> None:
    if config.engine not in ENGINES:
        raise PacelineError(f"engine {config.engine!r} is unknown{expected(config.engine, ENGINES)}")
    if config.engine == "ray":
        import paceline.ray  # noqa: F401 - it raises PacelineError if Ray is not installed

        server(config, min_samples).build(shared=True)
        for name in ("patience", "max_restarts", "dead_after"):
            if getattr(config, name) != getattr(TrainConfig, name):
                raise PacelineError(
                    f"--{dashed(name)} is for --engine torch; leave it out with --engine ray, which continues "
                    "without a lost worker by itself"
                )
    else:
        _check_left_out(config, "--engine ray", ("sync", "backup", "mode", "rate", "address"))


def _check_left_out(config: TrainConfig, other: str, names: tuple[str, ...]) -> None:
    for name in names:
        if getattr(config, name) != getattr(TrainConfig, name):
            raise PacelineError(f"--{name} is for {other}; add it, or leave out --{name}")


def _check_loop(config: TrainConfig) -> None:
    if config.loop not in LOOPS:
        raise PacelineError(f"loop {config.loop!r} is unknown{expected(config.loop, LOOPS)}")
    if config.loop == "round":
        _check_left_out(config, "--loop local", ("every", "outer"))
        return
    wrong = (
        "--engine ray moves parameters by its own rules; use --engine torch"
        if config.engine != "torch"
        else "--steps counts steps of all workers together, and each takes its own; use --epochs"
        if config.steps is not None
        else "--micro-batch cuts a step into passes, and each pass is a step; choose a --global-batch whose part fits"
        if config.micro_batch is not None
        else "--limits are samples of an interval; leave them out"
        if config.limits is not None
        else "--weigh hook weighs what DDP sums, and each worker steps by itself; use --weigh loss"
        if config.weigh != "loss"
        else ""
    )
    if wrong:
        raise PacelineError(f"--loop local: {wrong}")
    intervals.interval(config.every)
    intervals.outer(config.outer or "mean")


def _check_slowdown(config: TrainConfig, data: Data) -> None:
    names = ("slowdown", "slowdown_ms", "slowdown_trace")
    given = [f"--{dashed(name)}" for name in names if getattr(config, name) is not None]
    if len(given) > 1:
        raise PacelineError(f"{' and '.join(given)} were both given; expected one of them")
    if config.slowdown_trace is not None:
        _check_trace(config, config.slowdown_trace, data)
    values, least = (config.slowdown_ms, 0.0) if config.slowdown is None else (config.slowdown, 1.0)
    if values is None:
        return
    if len(values) != config.workers:
        raise PacelineError(
            f"{given[0]} has {len(values)} entries for {config.workers} workers; expected one for each"
        )
    for value in values:
        if not least <= value <= SLOWEST:
            raise PacelineError(
                f"{given[0]} has the entry {value:g}; expected numbers of at least {least:g}, and at most {SLOWEST:g}"
            )


def _check_trace(config: TrainConfig, file: str, data: Data) -> None:
    length, width = traces.read(file).seconds_per_sample.shape
    if width != config.workers:
        raise PacelineError(f"{file} has {width} workers, the run {config.workers}; expected the same number")
    rounds, takes = config.rounds(len(data.x_train)), "takes"
    one_by_one = (config.sync, config.backup) != ("bsp", "everyone")
    if config.engine == "ray" and one_by_one and config.steps is None:
        rounds, takes = rounds * config.workers, "may take"  # an update may use a single worker's gradient
    if length < rounds:
        raise PacelineError(
            f"{file} has {length} rounds and the run {takes} {rounds}; shorten it with --steps {length}, or give a "
            "longer trace"
        )


def _limits(config: TrainConfig, min_samples: int) -> tuple[Any, Any]:
    """Least and most samples of each worker, which runs at least ``min_samples`` samples if it runs any."""
    limits = config.limits if isinstance(config.limits, list) else None
    if limits is not None and len(limits) != config.workers:
        raise PacelineError(
            f"--limits has {len(limits)} entries for {config.workers} workers; expected least:most for each"
        )
    if limits is not config.limits:
        if config.limits != options.MEMORY or config.engine != "torch":
            raise PacelineError(
                f"--limits {config.limits}: expected least:most of each worker, or memory with --engine torch"
            )
        if config.weigh != "loss":
            raise PacelineError(
                "--limits memory drops what does not fit before it is summed; use --weigh loss"
            )
    least, most = options.least_and_most(limits, config.workers, config.global_batch, min_samples)
    return np.array(least, float), np.array(most, float)
